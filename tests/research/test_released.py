"""What compares a released checkpoint's results with the paper's tables, on files that lm-eval could have written."""

from pathlib import Path

import pytest
from result_files import model_record, ordinary_task, write_run

from research.released import compare
from sbeval.paper import measured_columns, published_values
from sbeval.results.records import TaskRecord

pytestmark = pytest.mark.exhaustive

PUBLISHED = {(v.table, v.column): v.value for v in published_values() if v.row == compare.RELEASED}
FACTS = {"name": "released", "parameters": 3_513_473_280, "training_length_tokens": 4096}


def written(folder: Path, *, limit: float | None = None, **instead: float) -> str:
    """Runs that print the paper's values, but for some tasks; each number of shots is a run."""
    for place, column in enumerate(column for column in measured_columns() if column.table < 5):
        value = instead.get(column.task, PUBLISHED[column.table, column.column]) / column.scale
        name, numbers, _, _ = ordinary_task(column.task, column.metric, value, stderr=0.01)
        results = {key.replace(",none", f",{column.filter}"): number for key, number in numbers.items()}
        perplexity = TaskRecord(family="perplexity", protocol="rolling", lengths=[4096]).to_json()
        fact = perplexity if "@" in column.metric else None
        model, date = model_record("stickbreaking", **FACTS), f"2026-11-20T10-00-{place:02d}.000001"
        extra = {"n-shot": {name: column.shots or 0}}
        write_run(folder, model, [(name, results, fact, [])], date=date, limit=limit, extra=extra)
    return str(folder)


@pytest.mark.parametrize(
    ("instead", "options", "code", "said"),
    [
        ({}, [], 0, ["16 agree, 0 differ, 0 not measured"]),
        ({"piqa": 79.7 + 1.0, "sb_paper_wikitext": 10.8 * 1.014, "gsm8k_cot": 49.7 - 1.0}, [], 0, ["16 agree"]),
        ({"piqa": 79.7 - 1.1}, [], 1, ["PIQA", "1.05  differ", "15 agree, 1 differ"]),
        ({"sb_paper_wikitext": 10.8 * 1.016}, [], 1, ["0.16  differ", "15 agree, 1 differ"]),
        ({"gsm8k_cot": 49.7 + 1.1}, [], 1, ["15 agree, 1 differ"]),
        ({"race": 30.0}, [], 1, ["0.40  differ", "14 agree, 2 differ"]),  # the mean is held to less than its parts
        ({"limit": 8}, [], 0, ["2 agree, 0 differ, 14 not measured"]),
        ({}, ["--row", "3B Softmax"], 1, ["ARC-c                     42.2         44.90"]),
        ({}, ["--row", "7B"], 1, ["Expected one of the paper's rows"]),
        ({}, ["--model", "other"], 1, ["Expected one of the models released, found 'other'"]),
    ],
)
def test_every_published_value_has_its_verdict(
    instead: dict[str, float],
    options: list[str],
    code: int,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["compare", written(tmp_path, **instead), *options])
    assert compare.main() == code
    printed = "".join(capsys.readouterr())
    assert not [words for words in said if words not in printed]
