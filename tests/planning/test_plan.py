"""`sbeval plan` reads spreads from earlier results or takes stated ones, and says what a run shows and costs."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_tree import ROOT

from sbeval.commands import cli
from sbeval.errors import UserError
from sbeval.planning.power import smallest_difference
from sbeval.reports.spreads import spread_of
from tests.reports.result_files import (
    CURVES,
    LENGTHS,
    model_record,
    ordinary_task,
    perplexity_task,
    ruler_task,
    write_run,
)

TEXT, NEEDLES = "sb_stdlib_fixed_target", "sb_niah_single_1"
CHECKPOINT = ROOT / "sbeval" / "demo" / "checkpoints" / "rope"

MODEL = ["--model_args", f"pretrained={CHECKPOINT}"]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models on a text and on needles."""
    folder = tmp_path_factory.mktemp("earlier")
    for attention, reach in (("stickbreaking", 60000), ("rope", 1024)):
        tasks = [
            perplexity_task("fixed_target", CURVES[attention], documents=60, size_log_deviation=0.3),
            ruler_task(NEEDLES, reach),
        ]
        write_run(folder / attention, model_record(attention), tasks)
    return folder


def plan(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.plan([*map(str, arguments)])
    assert ended.value.code == 0
    return capsys.readouterr().out


def document_sums(folder: Path, length: int) -> dict[str, tuple[float, float]]:
    """Adds up the samples file by hand: document to NLL and tokens."""
    sums: dict[str, tuple[float, float]] = {}
    (file,) = folder.glob(f"samples_{TEXT}_*.jsonl")
    for line in file.read_text().splitlines():
        for name, nats, tokens, *_ in json.loads(line)[f"nll@{length:07d}"]:
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + nats, before[1] + tokens)
    return sums


def paired(
    minuend: dict[str, tuple[float, float]], subtrahend: dict[str, tuple[float, float]]
) -> tuple[np.ndarray, np.ndarray]:
    """The difference of two curves in each document, in nats, and its tokens."""
    nats = np.array([minuend[name][0] - subtrahend[name][0] for name in sorted(minuend)])
    return nats, np.array([minuend[name][1] for name in sorted(minuend)])


def by_hand(nats: np.ndarray, tokens: np.ndarray) -> float:
    """The spread of the difference over documents."""
    residuals = nats - nats.sum() / tokens.sum() * tokens
    return float(residuals.std(ddof=1) / tokens.mean())


def test_spreads_are_those_of_the_documents_in_earlier_results(
    earlier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tasks", TEXT, "--lengths", "1024,4096", "--documents", 80, "--difference", 0.001, "--json"]
    planned = json.loads(plan(capsys, earlier, *options))
    rows = {row["difference"]: row for row in planned["differences"]}
    assert set(rows) == {
        *("4,096 minus 1,024, demo-sb", "4,096 minus 1,024, demo-rope"),
        *("demo-sb minus demo-rope, 1,024", "demo-sb minus demo-rope, 4,096"),
    }
    sums = {
        (name, length): document_sums(earlier / name, length)
        for name in ("stickbreaking", "rope")
        for length in (1024, 4096)
    }
    expected = {
        "4,096 minus 1,024, demo-sb": paired(sums["stickbreaking", 4096], sums["stickbreaking", 1024]),
        "demo-sb minus demo-rope, 4,096": paired(sums["stickbreaking", 4096], sums["rope", 4096]),
    }
    for name, (nats, tokens) in expected.items():
        row = rows[name]
        assert row["spread"] == pytest.approx(by_hand(nats, tokens))
        spread = spread_of(nats, tokens, graded=False)
        for direction, is_rise in (("rise", True), ("fall", False)):
            at, *ends = spread.smallest(80, rise=is_rise)
            assert row[f"smallest_{direction}"] == pytest.approx(at)
            assert row[f"smallest_{direction}_ci95"] == pytest.approx(ends)
            assert ends[0] < at < ends[1]
        assert row["needed"] == spread.needed(0.001)[0]
        assert row["needed_ci95"][0] < row["needed"] < row["needed_ci95"][1]
    assert rows["demo-sb minus demo-rope, 4,096"]["comparisons"] == 2
    (cost,) = planned["costs"]
    assert (cost["tokens"], cost["is_counted"]) == (80 * (1024 + 4096), False)
    assert "tokens per second, as the earlier run had on NVIDIA H100" in planned["time_source"]


def test_scores_have_the_spread_of_changed_samples(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tasks", NEEDLES, "--lengths", "1024,4096", "--documents", 100, "--json"]
    rows = {row["difference"]: row for row in json.loads(plan(capsys, earlier, *options))["differences"]}
    (file,) = (earlier / "rope").glob(f"samples_{NEEDLES}_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    changes = np.array([sample["score@0004096"] - sample["score@0001024"] for sample in samples])
    row = rows["4,096 minus 1,024, demo-rope"]
    assert row["unit"] == "score"
    assert row["spread"] == pytest.approx(changes.std(), rel=0.1)
    assert (changes != 0).mean() > 0.1


def test_the_text_says_what_to_do_next(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, earlier, "--tasks", f"{TEXT},{NEEDLES}", "--difference", 0.01, "--lengths", "1024,4096")
    assert f"{TEXT}, nats per token: smallest difference that 40 documents show with a power of 80%" in text
    assert re.search(r"spread \[95%\] +rise \[95%\] +fall \[95%\]", text)
    assert "documents for 0.01 [95%]" in text
    assert f"{NEEDLES}, score:" in text
    assert "Spread: 60 documents of the earlier results." in text
    assert text.splitlines()[-1].startswith("Next: sbeval run --model_args pretrained=CKPT --tasks")
    few = plan(capsys, earlier, "--tasks", TEXT, "--documents", 10)
    assert "With fewer than 20 documents there is no interval, so nothing is shown." in few


def test_stated_spreads_need_no_results(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tasks", f"{TEXT},{NEEDLES}", "--spread", 0.05, "--changed", 0.25, "--lengths", "1024,4096,16384"]
    planned = json.loads(plan(capsys, *options, "--tokens_per_second", 1000, "--json"))
    text, needles = planned["differences"]
    assert (text["spread"], needles["spread"], text["comparisons"]) == (0.05, 0.5, 2)
    assert text["smallest_rise"] == text["smallest_fall"] == pytest.approx(smallest_difference(0.05, 40))
    assert text["smallest_together"] == [pytest.approx(smallest_difference(0.05, 40, comparisons=2))] * 2
    tokens = 40 * (1024 + 4096 + 16384)
    assert [cost["tokens"] for cost in planned["costs"]] == [tokens, tokens]
    assert planned["costs"][0]["seconds"] == tokens / 1000


def test_a_checkpoint_counts_tokens_as_inspect_does(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tasks", TEXT, "--spread", 0.05, "--lengths", "64,128", "--documents", 3, "--difference", 0.01]
    model = ["--model_args", f"pretrained={CHECKPOINT}"]
    planned = json.loads(plan(capsys, *options, *model, "--json"))
    (cost,) = planned["costs"]
    inspected = ["--tasks", TEXT, "--metadata", '{"context_lengths": [64, 128]}', "--limit", 3, "--json"]
    with pytest.raises(SystemExit):
        cli.inspect([str(CHECKPOINT), *map(str, inspected)])
    (work,) = json.loads(capsys.readouterr().out)["tasks"]
    assert (cost["tokens"], cost["units"], cost["is_counted"]) == (work["tokens"], 3, True)
    assert "The time is unknown" in plan(capsys, *options, *model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--documents", "40"], "--tasks names no task"),
        (["--tasks", TEXT], "is unknown, because no earlier results are named: state one with --spread"),
        (["--tasks", TEXT, "--changed", "0.3"], f"spread of {TEXT} is unknown"),
        (["--tasks", "sb_nothing", "--spread", "1"], "There is no task 'sb_nothing'"),
        (["--tasks", TEXT, "--spread", "0"], "Expected --spread to be a number above 0, found 0"),
        (["--tasks", TEXT, "--spread", "1", "--power", "1"], "Expected --power of at least 0.5 and below 1, found 1"),
        (["--tasks", TEXT, "--spread", "1", "--lengths", "x"], "list of positive whole numbers"),
        (["--tasks", TEXT, "--spread", "1", "--measure"], "--measure needs a checkpoint"),
        (["--tasks", TEXT, "--spread", "1", "--model_args", "pretraned=x"], "--model_args needs a checkpoint"),
        (["--tasks", TEXT, "--spread", "1", "--metadata", "{}"], "--metadata needs a checkpoint"),
        (["--tasks", TEXT, "--spread", "1", "--power", "0.3"], "of at least 0.5 and below 1, found 0.3"),
        (["--tasks", "sb_span,sb_mqrar", "--changed", "0.3"], "sb_span, sb_mqrar cannot be planned"),
        (
            ["--tasks", TEXT, "--spread", "1", "--measure", "--tokens_per_second", "9", *MODEL],
            "--measure and --tokens_per_second both set the speed",
        ),
        (
            ["--tasks", TEXT, "--spread", "1", "--lengths", "64", "--metadata", '{"context_lengths": [128]}', *MODEL],
            "--lengths says 64, and context_lengths in --metadata says 128",
        ),
        (["no-such-folder", "--tasks", TEXT], "no-such-folder"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        cli.plan(arguments)
    assert "\n" not in str(raised.value)


def test_results_without_shared_documents_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = perplexity_task("fixed_target", CURVES["rope"][:1], lengths=LENGTHS[:1])
    write_run(tmp_path / "one", model_record("rope"), [task, ruler_task(NEEDLES, 1024)])
    text = plan(capsys, tmp_path, "--tasks", f"{TEXT},{NEEDLES},sb_text_stream", "--lengths", "512,1024")
    assert "sb_text_stream is not planned: the earlier results do not contain it; state one" in text
    assert f"{TEXT} is not planned: the earlier results have no two of these lengths and no two models" in text


def test_a_task_with_fewer_documents_is_planned_with_those(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--tasks",
        NEEDLES,
        "--changed",
        0.25,
        "--lengths",
        "512",
        "--documents",
        40,
        "--difference",
        0.2,
        *MODEL,
    ]
    metadata = ["--metadata", '{"num_samples": 30}']
    planned = json.loads(plan(capsys, *options, *metadata, "--json"))
    ((difference,), (cost,)) = planned["differences"], planned["costs"]
    assert difference["units"] == difference["available"] == cost["units"] == 30
    assert difference["smallest_rise"] is None  # larger than the share of changed samples
    assert difference["needed"] > 30
    assert f"{NEEDLES} has 30, not 40: the plan is for 30." in planned["notes"]
    text = plan(capsys, *options, *metadata)
    assert f"{difference['needed']}*" in text
    assert "* More than the task has: 30 samples." in text


def test_time_from_a_speed_leaves_out_generation(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tasks", f"{TEXT},{NEEDLES}", "--spread", 0.05, "--changed", 0.25, "--lengths", "512"]
    options += ["--documents", 2, "--tokens_per_second", 100]
    stated = json.loads(plan(capsys, *options, "--json"))["costs"]
    assert [cost["excludes_generation"] for cost in stated] == [False, True]
    counted = json.loads(plan(capsys, *options, *MODEL, "--json"))["costs"]
    assert counted[1]["new_tokens"] > 0
    assert [cost["seconds"] for cost in counted] == [cost["tokens"] / 100 for cost in counted]
    text_row, needle_row = (
        next(row for row in plan(capsys, *options, *MODEL).splitlines() if row.startswith(f"  {task}"))
        for task in (TEXT, NEEDLES)
    )
    assert needle_row.endswith("without generation")
    assert "without" not in text_row


def test_scores_differ_by_no_more_than_the_share_that_changes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tasks", NEEDLES, "--changed", 0.05, "--difference", 0.1]
    few = json.loads(plan(capsys, *options, "--documents", 40, "--json"))["differences"][0]
    assert smallest_difference(0.05**0.5, 40) > 0.05
    assert few["smallest_rise"] is few["smallest_fall"] is few["needed"] is None
    many = json.loads(plan(capsys, *options, "--documents", 4000, "--json"))["differences"][0]
    assert many["smallest_rise"] == pytest.approx(smallest_difference(0.05**0.5, 4000))
    text = plan(capsys, *options, "--documents", 40)
    assert "more than any number of samples" in text
    assert "No difference is larger than 0.05, the share of samples that change." in text


def test_tasks_without_lengths_or_scores_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--tasks",
        f"{NEEDLES},sb_span,hellaswag",
        "--changed",
        0.25,
        "--lengths",
        "512,1024",
        "--documents",
        400,
    ]
    text = plan(capsys, *options)
    assert "sb_span is not planned: its samples have neither an NLL of text nor scores of 0 or 1." in text
    assert (
        "hellaswag is a task of lm-eval, without context lengths: the plan holds if its samples score 0 or 1." in text
    )
    planned = json.loads(plan(capsys, *options, "--json"))
    assert [each["difference"] for each in planned["differences"]] == ["any two lengths or models", "any two models"]
    assert [each["comparisons"] for each in planned["differences"]] == [1, 1]


def test_the_next_step_runs_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tasks", TEXT, "--spread", 0.05, "--lengths", "64,128", "--documents", 3]
    model = ["--model_args", f"pretrained={CHECKPOINT},dtype=float32", "--metadata", '{"bos": "text"}']
    words = shlex.split(plan(capsys, *options, *model).splitlines()[-1])
    values = {name: words[words.index(name) + 1] for name in ("--model_args", "--metadata", "--tasks", "--limit")}
    assert json.loads(values["--model_args"]) == {"pretrained": str(CHECKPOINT), "dtype": "float32"}
    assert json.loads(values["--metadata"]) == {"bos": "text", "context_lengths": [64, 128]}
    assert (values["--tasks"], values["--limit"]) == (TEXT, "3")
    words = shlex.split(plan(capsys, *options).splitlines()[-1])
    assert json.loads(words[words.index("--metadata") + 1]) == {"context_lengths": [64, 128]}


def test_each_cause_of_a_missing_spread_has_its_own_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [ruler_task(NEEDLES, 1024), ordinary_task("hellaswag", "acc", 0.5, samples=60)]
    write_run(tmp_path / "logged", model_record("rope"), tasks)
    unlogged = [ruler_task("sb_niah_single_2", 1024)]
    write_run(
        tmp_path / "unlogged", model_record("rope"), unlogged, date="2026-11-21T10-00-00.000001", log_samples=False
    )
    text = plan(capsys, tmp_path, "--tasks", f"{NEEDLES},hellaswag,sb_niah_single_2")
    assert "hellaswag is not planned: its scores in the earlier results have no context lengths;" in text
    assert "sb_niah_single_2 is not planned: the earlier results have no samples of it, which --log_samples" in text
