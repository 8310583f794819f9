"""What compares a released checkpoint's results with the paper's tables, on files that lm-eval could have written."""

from pathlib import Path

import pytest
from result_files import model_record, ordinary_task, write_run

from research.released import compare
from sbeval.paper import measured_columns, published_values
from sbeval.reports import load_results
from sbeval.results.records import TaskRecord
from sbeval.sweep.command import load_sweep

PUBLISHED = {(v.table, v.column): v.value for v in published_values() if v.row == compare.RELEASED}
FACTS = {"name": "released", "parameters": 3_513_473_280, "training_length_tokens": 4096}


def written(folder: Path, *, limit: float | None = None, **instead: float) -> Path:
    """Runs that print the paper's values, but for some tasks, a run for each number of shots."""
    for place, column in enumerate(column for column in measured_columns() if column.table < 5):
        value = instead.get(column.task, PUBLISHED[column.table, column.column]) / column.scale
        task = ordinary_task(column.task, column.metric, value, stderr=0.01)
        results = {key.replace(",none", f",{column.filter}"): number for key, number in task[1].items()}
        record = (
            TaskRecord(family="perplexity", protocol="rolling", lengths=[4096]).to_json()
            if "wikitext" in column.task
            else None
        )
        shots = {"n-shot": {column.task: column.shots or 0}}
        date = f"2026-11-20T10-00-{place:02d}.000001"
        model = model_record("stickbreaking", **FACTS)
        write_run(folder, model, [(task[0], results, record, [])], date=date, limit=limit, extra=shots)
    return folder


def verdicts(folder: Path) -> dict[tuple[int, str], str]:
    return {(c.table, c.column): c.verdict for c in compare.compare(load_results([folder]), model="released")}


def test_the_papers_own_values_agree_and_all_are_compared(tmp_path: Path) -> None:
    said = verdicts(written(tmp_path))
    assert said.keys() == PUBLISHED.keys() | {(1, "parameters"), (1, "training length")}
    assert set(said.values()) == {"agree"}


@pytest.mark.parametrize(
    ("task", "cell", "agreeing", "differing"),
    [
        ("piqa", (2, "PIQA"), 79.7 + 1.0, 79.7 - 1.1),
        ("sb_paper_wikitext", (2, "Wikitext"), 10.8 * 1.01, 10.8 * 1.016),
        ("gsm8k_cot", (4, "8-shot CoT"), 49.7 - 1.0, 49.7 + 1.1),
    ],
)
def test_a_value_differs_beyond_what_is_allowed(
    task: str, cell: tuple[int, str], agreeing: float, differing: float, tmp_path: Path
) -> None:
    assert verdicts(written(tmp_path / "near", **{task: agreeing}))[cell] == "agree"
    assert verdicts(written(tmp_path / "far", **{task: differing}))[cell] == "differ"


def test_the_mean_is_held_to_less_than_its_parts(tmp_path: Path) -> None:
    tasks = [column.task for column in measured_columns() if column.table == 2 and column.task != "sb_paper_wikitext"]
    values = {c.task: PUBLISHED[2, c.column] + 0.6 for c in measured_columns() if c.task in tasks and c.table == 2}
    said = verdicts(written(tmp_path, **values))
    assert (said[2, "PIQA"], said[2, "Avg."]) == ("agree", "differ")


def test_a_run_with_a_limit_counts_as_none(tmp_path: Path) -> None:
    said = verdicts(written(tmp_path, limit=8))
    assert {verdict for (table, _), verdict in said.items() if table > 1} == {"not measured"}


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ([], 1, "14 agree, 2 differ, 0 not measured"),
        (["--row", "3B Softmax"], 1, " differ, 0 not measured"),
        (["--row", "7B"], 1, "Expected one of the paper's rows"),
        (["--model", "other"], 1, "Expected one of the models released, found 'other'"),
    ],
)
def test_the_command_prints_a_verdict_for_each_value(
    options: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["compare", str(written(tmp_path, race=30.0)), *options])
    assert compare.main() == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def test_the_sweep_measures_every_column_of_the_checkpoints_tables() -> None:
    sweep = load_sweep(Path(compare.__file__).with_name("sweep.yaml"))
    assert {"sb_paper_nlp", "sb_paper_mmlu", "sb_paper_gsm8k", "sb_paper_ruler"} <= {
        t for r in sweep.runs for t in r.tasks
    }
    assert [run.num_fewshot for run in sweep.runs if run.tasks == ("sb_paper_mmlu",)] == [0, 5]
