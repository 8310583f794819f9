"""`sbeval report` and `sbeval convert`: options reach the rooms behind them, and wrong ones are named."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from other_machines import assert_equal_but_for_rounding
from typer.testing import CliRunner, Result

from sbeval.checkpoints import load_checkpoint
from sbeval.commands.cli import app
from sbeval.errors import UserError
from tests.checkpoints.layouts import dolomite, save, tokens
from tests.reports.result_files import CURVES, model_record, perplexity_task, write_run

SBEVAL = Path(sys.executable).with_name("sbeval")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    for attention in ("stickbreaking", "rope"):
        tasks = [
            perplexity_task(protocol, CURVES[attention][:5], lengths=[256 << step for step in range(5)])
            for protocol in ("stream", "fixed_target")
        ]
        write_run(folder / attention, model_record(attention), tasks)
    return folder


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.exhaustive
def test_title_labels_baseline_and_choice_reach_the_page(results: Path, tmp_path: Path) -> None:
    options = ["--title", "A title of mine", "--label", "demo-sb=First", "--label", "demo-rope=Second"]
    options += ["--baseline", "First", "--only", "First", "--only", "Second", "--only", "*_stream"]
    found = command("report", results, "-o", tmp_path / "out", *options)
    assert found.exit_code == 0, found.output
    page = (tmp_path / "out" / "index.html").read_text()
    assert all(text in page for text in ("A title of mine", "First", "Second"))
    table = (tmp_path / "out" / "results.csv").read_text()
    assert "sb_stdlib_stream" in table
    assert "fixed_target" not in table


def test_the_last_line_of_a_report_says_what_to_open_also_after_publishing(results: Path, tmp_path: Path) -> None:
    published = ["--hub-results", tmp_path / "hub", "--hub-dataset", "sb_stdlib_stream=someone/text"]
    found = command("report", results, "-o", tmp_path / "a folder", "--only", "*_stream", *published)
    page = tmp_path / "a folder" / "index.html"
    assert {file.relative_to(tmp_path / "hub").as_posix() for file in (tmp_path / "hub").rglob("*.yaml")} == {
        f"{model}/.eval_results/sb_stdlib_stream.yaml" for model in ("demo-sb", "demo-rope")
    }
    assert found.stdout.splitlines()[-1] == f"Next: open {page.as_uri()} in a browser"


def test_two_models_of_a_folder_are_compared(results: Path) -> None:
    found = command("report", results, "--compare", "demo-sb", "demo-rope")
    assert found.exit_code == 0, found.output
    assert "demo-rope minus demo-sb" in found.stdout


def test_a_guard_that_cannot_judge_does_not_pass(tmp_path: Path) -> None:
    for name in ("a", "b"):
        task = perplexity_task("fixed_target", CURVES["rope"], documents=5)
        write_run(tmp_path / name, model_record("rope", checkpoint_sha256=name * 64), [task])
    compared = ("report", "--compare", tmp_path / "a", tmp_path / "b")
    assert command(*compared).exit_code == 0
    guarded = command(*compared, "--fail-if-worse")
    assert isinstance(guarded.exception, UserError)
    assert "20 documents" in str(guarded.exception)


@pytest.mark.parametrize(
    ("candidate", "options", "code", "said"),
    [
        ("rope", [], 1, r" worse\n(.*\n)*fail: stdlib.*: \+\d.*\n$"),
        ("stickbreaking", [], 0, "\nnothing is worse beyond what is allowed.*\n$"),
        ("rope", ["--least-effect", "50"], 0, "worse by too little to count"),
    ],
)
def test_a_worse_candidate_fails_where_that_is_asked_for(
    results: Path, candidate: str, options: list[str], code: int, said: str
) -> None:
    pair = [results / "stickbreaking", results / candidate]
    found = command("report", "--compare", *pair, "--fail-if-worse", *options)
    assert found.exit_code == code, found.output
    assert ("worse\n" in found.stdout) == bool(code)
    assert re.search(said, found.stdout)


@pytest.mark.parametrize(("corpus", "change", "code"), [("stdlib", 50, 0), ("stdlib", 0.1, 1), ("wikitext", 50, 3)])
def test_a_gate_s_code_is_its_verdict(results: Path, tmp_path: Path, corpus: str, change: float, code: int) -> None:
    policy = tmp_path / "gate.yaml"
    policy.write_text(f"rules: [{{task: sb_{corpus}_stream, length: 4096, largest_change: {change}}}]")
    found = command("report", "--compare", results / "stickbreaking", results / "rope", "--gate", policy)
    assert found.exit_code == code, found.output
    assert f"all rules: {['pass', 'fail', '', 'not enough data'][code]}" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gate", "gate.yaml"], "--gate needs --compare A B"),
        (["--compare", "a", "b", "--gate", "gate.yaml", "--fail-if-worse"], "exclude each other"),
        (["--least-effect", "0.1"], "--least-effect needs --compare A B"),
        (["--compare", "a", "b", "--least-effect", "-1"], "--least-effect to be 0 or more"),
        (["--label", "one"], "--label OLD=NEW"),
        (["--hub-results", "hub", "--watch"], "--watch and --compare cannot be combined with"),
        (["--compare", "a", "b", "--wandb", "project"], "--watch and --compare cannot be combined with"),
        (["--fail-if-worse"], "--fail-if-worse needs --compare A B"),
        (["--compare", "a", "b", "--watch", "--only", "x"], "or remove --watch, --only"),
    ],
)
def test_options_that_make_no_sense_are_refused(results: Path, arguments: list[str], words: str) -> None:
    found = command("report", results, *arguments)
    assert isinstance(found.exception, UserError)
    assert words in str(found.exception)


def test_a_report_of_nothing_is_refused() -> None:
    assert isinstance(command("report").exception, UserError)


@pytest.fixture
def lines_of_watch(tmp_path: Path) -> Iterator[Callable[[str], None]]:
    log = tmp_path / "log"
    words = [SBEVAL, "report", tmp_path / "results", "-o", tmp_path / "out", "--watch"]
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=tmp_path)

    def wait_for(words: str) -> None:
        end = time.monotonic() + 300
        while words not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)

    yield wait_for
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=600) == 0, log.read_text()


@pytest.mark.exhaustive
def test_watching_outlives_a_cut_off_file(results: Path, tmp_path: Path, lines_of_watch: Callable[[str], None]) -> None:
    (source,) = (results / "rope").rglob("results_*.json")
    lines_of_watch("Watching")
    half = tmp_path / "results" / source.name
    half.parent.mkdir()
    half.write_text(source.read_text()[:300])
    lines_of_watch("No result file of lm-eval can be used")
    for file in source.parent.iterdir():
        shutil.copy(file, half.parent)
    lines_of_watch("The page is")
    assert (tmp_path / "out" / "index.html").exists()


@torch.no_grad()
def test_a_converted_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    source = save(tmp_path / "source", *dolomite(model_type="gpt_dolomite", kv_heads=2, head_bias=True, head_norm=True))
    found = command("convert", source, tmp_path / "new", "--kv-expand", "tile", "--dtype", "float32")
    assert found.exit_code == 0, found.output
    assert "dolomite:" in found.stdout
    loaded = load_checkpoint(tmp_path / "new")
    assert loaded.format == "sbeval"
    expected = load_checkpoint(source, kv_expand="tile").model
    assert_equal_but_for_rounding(loaded.model(tokens()).logits, expected(tokens()).logits)
