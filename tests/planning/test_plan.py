"""`sbeval plan` reads spreads from earlier results or takes stated ones, and says what a run shows and costs."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_tree import ROOT

from sbeval.commands import cli
from sbeval.errors import UserError
from sbeval.planning.power import smallest_difference
from sbeval.reports.spreads import spread_of
from tests.reports.result_files import CURVES, LENGTHS, model_record, perplexity_task, ruler_task, write_run

TEXT, NEEDLES = "sb_stdlib_fixed_target", "sb_niah_single_1"
CHECKPOINT = ROOT / "sbeval" / "demo" / "checkpoints" / "rope"


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
        (["--tasks", TEXT, "--spread", "1", "--power", "1"], "Expected --power between 0 and 1, found 1"),
        (["--tasks", TEXT, "--spread", "1", "--lengths", "x"], "list of positive whole numbers"),
        (["--tasks", TEXT, "--spread", "1", "--measure"], "--measure needs a checkpoint"),
        (["--tasks", TEXT, "--spread", "1", "--model_args", "pretraned=x"], "--model_args needs a checkpoint"),
        (["--tasks", TEXT, "--spread", "1", "--metadata", "{}"], "--metadata needs a checkpoint"),
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
