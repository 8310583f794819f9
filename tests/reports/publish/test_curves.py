"""Curves in experiment trackers: offline, the trackers themselves hold the numbers of the table, one step a length."""

import json
import math
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from fresh_process import run_code
from result_files import CURVES, LENGTHS, model_record, perplexity_task, write_run

from sbeval.errors import UserError
from sbeval.reports import load_results
from sbeval.reports.publish.curves import STEP, curves_of, log_curves
from sbeval.reports.read.results import Results

NLL = "sb_stdlib_stream/nll"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    for attention in ("stickbreaking", "rope"):
        write_run(folder / attention, model_record(attention), [perplexity_task("stream", CURVES[attention])])
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return load_results([folder])


def test_curves_hold_each_number_at_its_length_in_order_and_nothing_missing(results: Results) -> None:
    curves = curves_of(results)
    assert {*curves} == {model.label for model in results.models}
    for model, lengths in curves.items():
        assert [*lengths] == LENGTHS
        rows = results.measurements[
            (results.measurements["setting"] == model) & (results.measurements["metric"] == "nll")
        ]
        assert {int(length): value for length, value in zip(rows[STEP], rows["value"], strict=True)} == {
            length: numbers[NLL] for length, numbers in lengths.items()
        }
        for numbers in lengths.values():
            assert numbers[f"{NLL}_ci95_low"] < numbers[NLL] < numbers[f"{NLL}_ci95_high"]
            assert all(map(math.isfinite, numbers.values()))


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
    expected = [
        (model, n, {STEP: n, **numbers}) for model, of in curves_of(results).items() for n, numbers in of.items()
    ]
    assert logged == expected
    assert len([*tmp_path.rglob("offline-run-*/run-*.wandb")]) == len(results.models)


def test_trackio_on_this_machine_holds_the_curves(folder: Path, results: Results, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    code = (  # a process of its own, since trackio reads its folder when it is imported
        "from sbeval.reports import load_results\nfrom sbeval.reports.publish.curves import log_curves\n"
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
