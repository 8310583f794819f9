"""Checkpoints of a training are evaluated when they are complete and not before; a report draws them over its steps."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sweep_inputs import stub_command, wait_for

from sbeval.errors import UserError
from sbeval.reports import build_report
from sbeval.sweep.definition import Sweep, SweepCheckpoint, SweepRun
from sbeval.sweep.execute import run_sweep
from sbeval.sweep.follow import checkpoints_below, follow, is_complete
from tests.reports.result_files import LENGTHS, model_record, perplexity_task, write_run


def write_checkpoint(folder: Path, *, state: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"weight": np.zeros(100, dtype=np.float32)}, folder / "model.safetensors")
    if state:
        (folder / "trainer_state.json").write_text("{}")
    return folder


def test_a_checkpoint_is_complete_when_all_of_it_is_there(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "checkpoint-1")
    assert is_complete(whole)
    weights = (whole / "model.safetensors").read_bytes()
    for size in range(0, len(weights), 7):
        (whole / "model.safetensors").write_bytes(weights[:size])
        assert not is_complete(whole)
    (whole / "model.safetensors").write_bytes(weights)
    for name in ("config.json", "trainer_state.json"):
        text = (whole / name).read_text()
        (whole / name).write_text("{")
        assert not is_complete(whole)
        (whole / name).write_text(text)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    (whole / "model.safetensors").rename(whole / "model-1.safetensors")
    assert not is_complete(whole)
    (whole / "model-2.safetensors").write_bytes(weights)
    assert is_complete(whole)


def test_a_checkpoint_without_a_trainers_state_has_to_settle(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint-1", state=False)
    assert not is_complete(folder)
    for path in (folder, *folder.iterdir()):
        os.utime(path, (time.time() - 120,) * 2)
    assert is_complete(folder)


def test_checkpoints_come_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for name in ("checkpoint-100", "checkpoint-20", "checkpoint-3", "tmp-checkpoint-4", "checkpoint-x"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoints_below(tmp_path)] == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]


def test_each_checkpoint_that_appears_is_evaluated_once(tmp_path: Path) -> None:
    training = tmp_path / "training"
    write_checkpoint(training / "checkpoint-10")
    code = "import sbeval.sweep.follow as f; f._LOOK_SECONDS = 0.1; from sbeval.__main__ import main; main()"
    command = [sys.executable, "-P", "-c", code, *stub_command(tmp_path)[-2:], "--follow", str(training)]
    started = tmp_path / "out" / "started.txt"

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            wait_for(started, 1)
            write_checkpoint(training / "unfinished").rename(training / "checkpoint-20")
            (training / "checkpoint-30").mkdir()
            wait_for(started, 2)
            time.sleep(0.5)
        finally:
            process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=600)
    assert process.returncode == 130, printed
    folders = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert folders == {"checkpoint-10", "checkpoint-20"}
    assert len(started.read_text().splitlines()) == 2


def test_a_checkpoint_that_the_training_deleted_is_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "training" / "checkpoint-10")
    settings = Sweep(
        follow=str(tmp_path / "training"),
        runs=(SweepRun(name="t", tasks=("t",)),),
        output=str(tmp_path / "out"),
        launcher=(sys.executable, "-c", f"import shutil; shutil.rmtree({str(checkpoint)!r}); raise SystemExit(1)"),
    )
    (failure,) = follow(settings, run_sweep, once=True)
    assert "checkpoint-10 was deleted in the meantime" in failure.reason


def test_a_folder_to_follow_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    settings = Sweep(follow=str(tmp_path / "none"), runs=(SweepRun(name="t", tasks=("t",)),))
    with pytest.raises(UserError, match="no training folder to follow at") as error:
        follow(settings, run_sweep)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="no checkpoints to evaluate"):
        Sweep(runs=(SweepRun(name="t", tasks=("t",)),))
    assert SweepCheckpoint(pretrained="x/checkpoint-10").folder_name == "checkpoint-10"


@pytest.mark.exhaustive
def test_a_report_draws_nll_at_each_length_over_the_steps_of_a_training(tmp_path: Path) -> None:
    for step, level in ((500, 3.0), (1000, 2.5), (2000, 2.25)):
        record = model_record("stickbreaking", checkpoint_sha256=f"{step:064d}", name=f"checkpoint-{step}")
        task = perplexity_task("stream", [level] * len(LENGTHS))
        write_run(tmp_path / "results" / str(step), record, [task], pretrained=f"runs/sb/checkpoint-{step}")
    build_report([tmp_path / "results"], tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text()
    assert "Over training steps" in page
    assert "From step 500 to 2,000, NLL in nats: 256 3." in page
    table = next((tmp_path / "report" / "latex").glob("steps-*.tex")).read_text()
    for step in ("500", "1,000", "2,000"):
        assert step in table
    assert list((tmp_path / "report" / "figures").glob("steps-*.svg"))
