"""Several runs at a time: each has GPUs of its own, all end together, and no run is two processes' at once."""

import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sweep_launcher
import yaml
from folders import snapshot
from full_disk import room_for
from hypothesis import given
from hypothesis import strategies as st

from sbeval.errors import UserError
from sbeval.sweep import Sweep, SweepCheckpoint, SweepRun, run_sweep
from sbeval.sweep.attempt import Outcome
from sbeval.sweep.engine import Workers
from sbeval.sweep.gpus import visible_gpus
from sbeval.sweep.plan import PlannedRun, plan
from sbeval.sweep.schedule import longest_first


def sweep(folder: Path, *checkpoints: str, behaviour: str = "slow", **of_run: Any) -> Sweep:
    return Sweep(
        checkpoints=tuple(SweepCheckpoint(pretrained=name) for name in checkpoints or ("one",)),
        runs=(SweepRun(name="t", tasks=("t",), **of_run),),
        output=str(folder),
        launcher=(sys.executable, str(sweep_launcher.__file__), behaviour),
    )


def spans(folder: Path) -> list[tuple[str, str | None, float, float]]:
    return [tuple(json.loads(line)) for line in (folder / "spans.jsonl").read_text(encoding="utf-8").splitlines()]


def most_at_once(found: list[tuple[str, str | None, float, float]]) -> int:
    return max(sum(began <= moment < ended for *_, began, ended in found) for *_, moment, _ in found)


def test_runs_side_by_side_leave_what_runs_one_after_another_leave(tmp_path: Path) -> None:
    names = ("one", "two", "broken", "three", "four")
    failed = {}
    for workers, behaviour in ((None, "slow"), ("3", "meet")):
        settings = sweep(tmp_path / str(workers) / "out", *names, behaviour=behaviour)
        failed[workers] = [str(failure.run) for failure in run_sweep(settings, workers=workers)]
    assert failed[None] == failed["3"] == ["broken/t"]
    left = {}
    for workers in (None, "3"):
        folder = tmp_path / str(workers) / "out"
        found = snapshot(folder, without=("started.txt", "spans.jsonl", "run.yaml", "log.txt"))
        left[workers] = found
    assert left[None] == left["3"]
    assert most_at_once(spans(tmp_path / "None" / "out")) == 1
    assert most_at_once(spans(tmp_path / "3" / "out")) > 1


def test_each_of_several_runs_has_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,-1,GPU-d")
    one = SweepRun(name="one", tasks=("t",))
    two = SweepRun(name="two", tasks=("t",), gpus=2)
    settings = sweep(tmp_path, "a", "b", "c").changed(runs=(one, two))
    assert run_sweep(settings, workers="auto") == []
    found = spans(tmp_path)
    assert sorted(len(str(gpus).split(",")) for _, gpus, *_ in found) == [1, 1, 1, 2, 2, 2]
    assert {gpu for _, gpus, *_ in found for gpu in str(gpus).split(",")} == {"GPU-a", "GPU-b", "GPU-c"}
    for (_, these, began, ended), (_, those, also_began, also_ended) in itertools.combinations(found, 2):
        if began < also_ended and also_began < ended:
            assert not {*str(these).split(",")} & {*str(those).split(",")}


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 4), st.integers(1, 4))
def test_no_gpu_is_given_twice_and_none_is_lost(needs: list[int], count: int, there: int) -> None:
    release = threading.Event()
    given_now: list[str] = []

    def hold(run: PlannedRun, children: object, variables: dict[str, str]) -> Outcome:
        given_now.extend(name for name in variables["CUDA_VISIBLE_DEVICES"].split(",") if name)
        release.wait()
        return Outcome("done")

    needs = [min(need, there) for need in needs]
    workers = Workers(hold, count, [f"GPU-{number}" for number in range(there)])
    try:
        running = 0
        for index, need in enumerate(needs):
            run = PlannedRun(label="a", name=str(index), folder=Path("x"), config={}, gpus=need)
            if workers.has_room(run):
                workers.start(run)
                running += 1
        release.set()
        while running:
            running -= len(workers.ended(1))
        assert len(set(given_now)) == len(given_now) <= there
        everything = PlannedRun(label="a", name="all", folder=Path("x"), config={}, gpus=there)
        assert workers.has_room(everything)
    finally:
        release.set()
        workers.end()


def test_runs_start_in_the_order_of_their_gpus_and_their_work(tmp_path: Path) -> None:
    for name, size in (("small", 10), ("large", 1000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"0" * size)
    runs = (
        SweepRun(name="short", tasks=("t",), context_lengths=(64,)),
        SweepRun(name="long", tasks=("t",), context_lengths=(64, 4096)),
        SweepRun(name="few", tasks=("t",), context_lengths=(4096,), limit=2),
        SweepRun(name="wide", tasks=("t",), context_lengths=(64,), limit=1, gpus=2),
    )
    checkpoints = tuple(SweepCheckpoint(pretrained=str(tmp_path / name)) for name in ("small", "large"))
    order = [str(run) for run in longest_first(plan(Sweep(checkpoints=checkpoints, runs=runs)))]
    assert order[:3] == ["large/wide", "small/wide", "large/long"]
    assert order[-1] == "small/few"


@pytest.mark.parametrize("given_name", ["0", "-1", "many", "1.5", ""])
def test_a_number_of_workers_that_cannot_be_is_one_sentence(given_name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Expected --workers to be a whole number of at least 1, or auto") as error:
        run_sweep(sweep(tmp_path), workers=given_name)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_more_gpus_a_run_than_there_are_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for workers in (None, "1"):
        with pytest.raises(UserError, match=r"at most 2 GPUs a run.*found gpus: 3 of run 't'"):
            run_sweep(sweep(tmp_path, gpus=3), workers=workers)
    assert not list(tmp_path.iterdir())


def test_gpus_are_those_the_driver_lists_parts_of_one_before_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    whole = "GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n"
    driver.write_text(f"#!/bin/sh\ncat <<END\n{whole}END\n")
    driver.chmod(0o755)
    assert visible_gpus() == ("GPU-1", "GPU-2")
    driver.write_text(f"#!/bin/sh\ncat <<END\n{whole}  MIG 1g.18gb Device 0: (UUID: MIG-3)\nEND\n")
    assert visible_gpus() == ("MIG-3",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == ()


def test_ending_a_sweep_ends_all_its_runs_and_their_workers(tmp_path: Path) -> None:
    written = {
        "output": str(tmp_path / "out"),
        "checkpoints": ["one", "two", "three"],
        "runs": [{"name": "t", "tasks": ["t"]}],
        "launcher": [sys.executable, str(sweep_launcher.__file__), "hang"],
    }
    (tmp_path / "out").mkdir()
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(written), encoding="utf-8")
    command = [sys.executable, "-P", "-m", "sbeval", "sweep", str(tmp_path / "sweep.yaml"), "--workers", "2"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        started = tmp_path / "out" / "started.txt"
        while not (started.exists() and len(started.read_text().splitlines()) == 2):
            time.sleep(0.05)
        while not (tmp_path / "out" / "hanging.txt").exists():
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=30)
    with (tmp_path / "out" / "held.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while a process of a run is left
    assert process.returncode == 128 + signal.SIGTERM
    assert printed.splitlines()[-1] == "Ended by SIGTERM; the same command can be run again."
    assert "Traceback" not in printed
    assert len(started.read_text().splitlines()) == 2
    assert run_sweep(sweep(tmp_path / "out", "one", "two", "three"), workers="2") == []


def test_a_full_disk_is_one_sentence_of_the_run_it_stopped(tmp_path: Path) -> None:
    for files in range(4):
        (tmp_path / str(files)).mkdir()
        with room_for(files, tmp_path / str(files) / "one"):
            (failure,) = run_sweep(sweep(tmp_path / str(files), "one", "two"), workers="2")
        assert str(failure.run) == "one/t"
        assert "No space left on device" in failure.reason
        assert "\n" not in failure.reason
        assert run_sweep(sweep(tmp_path / str(files), "one", "two")) == []


def test_the_progress_of_all_is_one_line_with_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sbeval.sweep.schedule._REPORT_SECONDS", 0.1)
    assert run_sweep(sweep(tmp_path, "one", "two", "three", "four"), workers="2") == []
    printed = capsys.readouterr().out
    assert "    2 running (one/t, two/t), 2 waiting\n" in printed
    assert "    2 running (three/t, four/t), 0 waiting, about " in printed
    assert " s left" in printed


def test_the_engine_for_clusters_is_not_imported_where_it_is_not_used() -> None:
    code = "import sys, sbeval.sweep.execute; print('ray' in sys.modules, 'sbeval.sweep.ray_engine' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["False", "False"]
