"""What is published: the hub's own client reads its files back, and trackers hold the numbers of the table, offline."""

import json
import math
import re
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fresh_process import run_code
from huggingface_hub import EvalResultEntry
from huggingface_hub._eval_results import parse_eval_result_entries
from result_files import CURVES, LENGTHS, model_record, perplexity_task, write_pair, write_run

from sbeval.errors import UserError
from sbeval.reports import load_results
from sbeval.reports.publish import FOLDER, STEP, curves_of, log_curves, write_hub_results
from sbeval.reports.read.results import Results

TASK = "sb_stdlib_stream"
NLL = f"{TASK}/nll"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("results"), "stream")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return load_results([folder])


def test_curves_hold_each_number_at_its_length_in_order_and_nothing_missing(results: Results) -> None:
    curves = curves_of(results)
    assert {*curves} == {model.label for model in results.models}
    for model, lengths in curves.items():
        assert [*lengths] == LENGTHS
        rows = results.measurements.query(f"setting == '{model}' and metric == 'nll'")
        assert dict(zip(rows[STEP], rows["value"], strict=True)) == {n: numbers[NLL] for n, numbers in lengths.items()}
        for numbers in lengths.values():
            assert numbers[f"{NLL}_ci95_low"] < numbers[NLL] < numbers[f"{NLL}_ci95_high"]
            assert all(map(math.isfinite, numbers.values()))


@pytest.mark.exhaustive
def test_wandb_offline_holds_the_curves(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    logged: list[tuple[str, int, dict[str, Any]]] = []
    real = wandb.sdk.wandb_run.Run.log

    def log(run: Any, data: dict[str, Any], step: int) -> None:
        logged.append((run.name, step, data))
        real(run, data, step=step)

    monkeypatch.setattr(wandb.sdk.wandb_run.Run, "log", log)
    log_curves(results, "wandb", project="tests")
    curves = curves_of(results).items()
    assert logged == [(model, n, {STEP: n, **numbers}) for model, of in curves for n, numbers in of.items()]
    assert len([*tmp_path.rglob("offline-run-*/run-*.wandb")]) == len(results.models)


@pytest.mark.exhaustive
def test_trackio_on_this_machine_holds_the_curves(folder: Path, results: Results, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    code = (  # a process of its own, since trackio reads its folder when it is imported
        "from sbeval.reports import load_results\nfrom sbeval.reports.publish import log_curves\n"
        f"log_curves(load_results([{str(folder)!r}]), 'trackio', project='tests')"
    )
    run_code(code, environment={"TRACKIO_DIR": str(tmp_path)})
    (database,) = tmp_path.glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, metrics from metrics order by run_name, step").fetchall()
    assert {(name, step) for name, step, _ in rows} == {
        (model, length) for model, lengths in curves_of(results).items() for length in lengths
    }
    for name, step, metrics in rows:
        assert json.loads(metrics) == {STEP: step, **curves_of(results)[name][step]}


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_named_with_what_installs_it(
    results: Results, tracker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(UserError, match=rf"pip install 'sbeval\[{tracker}\]'"):
        log_curves(results, tracker, project="tests")


def entries(file: Path) -> list[EvalResultEntry]:
    return parse_eval_result_entries(yaml.safe_load(file.read_text(encoding="utf-8")))


def test_every_length_of_every_model_is_an_entry_with_the_tables_number(results: Results, tmp_path: Path) -> None:
    written = write_hub_results(results, tmp_path / "hub", datasets={TASK: "someone/text"})
    places = {model.label: tmp_path / "hub" / model.label / FOLDER / f"{TASK}.yaml" for model in results.models}
    assert {*written.files} == {*places.values()}
    for model in results.models:
        table = results.measurements
        nll = table[(table["setting"] == model.label) & (table["metric"] == "nll")]
        expected = dict(zip(nll["context_length_tokens"], nll["value"], strict=True))
        assert sorted(expected) == LENGTHS
        read = {entry.task_id: entry for entry in entries(places[model.label])}
        for length, value in expected.items():
            entry = read[f"{TASK}/nll@{length}"]
            assert (entry.dataset_id, entry.value) == ("someone/text", value)
            assert re.search(rf"context length {length:,} tokens; NLL in nats .*95% interval", entry.notes or "")


@pytest.mark.parametrize(
    ("datasets", "said"),
    [
        *(({TASK: text}, "owner/name") for text in ("no-owner", "a/b/c")),
        ({"sb_stdlib": "a/b"}, "no task 'sb_stdlib'"),
        ({}, rf"\({TASK}\): name one with --hub-dataset"),
    ],
)
def test_a_wrong_data_set_is_refused(results: Results, tmp_path: Path, datasets: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        write_hub_results(results, tmp_path / "hub", datasets=datasets)
    assert not (tmp_path / "hub").exists()


def test_the_data_set_is_read_from_what_the_run_recorded(tmp_path: Path) -> None:
    of_hub = perplexity_task("stream", CURVES["rope"], corpus="pile")
    of_hub[2]["corpus_detail"] = "NeelNanda/pile-10k:train"
    write_run(tmp_path / "run", model_record("rope"), [of_hub])
    (file,) = write_hub_results(load_results([tmp_path / "run"]), tmp_path / "hub", datasets={}).files
    assert {entry.dataset_id for entry in entries(file)} == {"NeelNanda/pile-10k"}


def test_what_lies_in_the_way_is_kept(results: Results, tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        write_hub_results(results, tmp_path / "hub", datasets={TASK: "a/b"})
    write_hub_results(results, tmp_path / "hub", datasets={TASK: "a/b"}, replace=True)
    (aside,) = tmp_path.glob("hub.old-*")
    assert (aside / "mine.txt").read_text() == "mine"
