"""No run is two processes' at once: a living holder keeps its run, and what a dead one left is taken over."""

import contextlib
import dataclasses
import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sweep_launcher
from filelock import FileLock

from sbeval.sweep import Sweep, SweepCheckpoint, SweepRun, run_sweep
from sbeval.sweep import holder as holder_module
from sbeval.sweep.holder import HeldError, Holder, holding, read_holder


def sweep(folder: Path, *checkpoints: str) -> Sweep:
    return Sweep(
        checkpoints=tuple(SweepCheckpoint(pretrained=name) for name in checkpoints or ("one",)),
        runs=(SweepRun(name="t", tasks=("t",)),),
        output=str(folder),
        launcher=(sys.executable, str(sweep_launcher.__file__), "slow"),
    )


def close_when(file: Path, held: contextlib.ExitStack) -> None:
    while not file.exists():
        time.sleep(0.001)
    held.close()


def test_a_run_that_somebody_else_is_at_is_looked_at_again_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.ExitStack() as held:
        held.enter_context(holding(tmp_path / "one" / "t"))
        threading.Thread(target=close_when, args=(tmp_path / "started.txt", held)).start()
        assert run_sweep(sweep(tmp_path, "one", "two")) == []
    printed = capsys.readouterr().out
    assert f"one/t: held by process {os.getpid()} on " in printed
    assert "2 runs: 2 done" in printed


def test_a_run_that_is_held_to_the_end_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with holding(tmp_path / "one" / "t"):
        assert run_sweep(sweep(tmp_path)) == []
    printed = capsys.readouterr().out
    assert "1 run: 0 done, 0 complete before, 1 held" in printed
    assert f"one/t: being run by process {os.getpid()} on " in printed
    assert "Next: the same command again" in printed
    assert not (tmp_path / "started.txt").exists()
    (tmp_path / "one" / "t").mkdir(exist_ok=True)
    with FileLock(tmp_path / "one" / "t" / "running.lock"):  # one that names nobody, as earlier versions made it
        assert run_sweep(sweep(tmp_path)) == []
    assert not (tmp_path / "started.txt").exists()


def test_the_lock_of_a_run_names_host_process_and_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("JOB_ID", "43"), ("ARRAY_JOB_ID", "41"), ("ARRAY_TASK_ID", "7")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    with holding(tmp_path):
        found = read_holder(tmp_path / "running.lock")
        assert found is not None
        assert (found.process, found.job) == (os.getpid(), "Slurm job 41_7")
        with pytest.raises(HeldError, match=f"process {os.getpid()} on .* \\(Slurm job 41_7\\)"), holding(tmp_path):
            pass
    assert not list(tmp_path.iterdir())


def write_lock(folder: Path, silent_seconds: float, **changes: Any) -> Path:
    lock = folder / "running.lock"
    record = dataclasses.replace(Holder.this_process(), **changes)
    part = folder / "part"
    part.write_text(json.dumps(dataclasses.asdict(record)))
    os.utime(part, (time.time() - silent_seconds,) * 2)
    part.rename(lock)
    return lock


def dead_process() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


@pytest.mark.parametrize("of_this_machine", [True, False])
def test_what_a_dead_holder_left_is_taken_over(
    of_this_machine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder_module, "_SETTLING_SECONDS", 0.0)
    if of_this_machine:
        write_lock(tmp_path, 0.0, process=dead_process())
    else:
        write_lock(tmp_path, holder_module.DEAD_AFTER_SECONDS + 5, machine="another", host="node2")
    with holding(tmp_path):
        found = read_holder(tmp_path / "running.lock")
        assert found is not None
        assert found.process == os.getpid()
    assert not list(tmp_path.iterdir())


def test_a_number_that_another_process_got_since_is_not_the_holder(tmp_path: Path) -> None:
    started = Holder.this_process().started
    assert started is not None
    write_lock(tmp_path, 0.0, started=started - 1)
    with holding(tmp_path):
        pass


@pytest.mark.parametrize("silent_seconds", [0.0, holder_module.DEAD_AFTER_SECONDS / 2])
def test_a_living_holder_of_another_machine_keeps_its_run(silent_seconds: float, tmp_path: Path) -> None:
    lock = write_lock(tmp_path, silent_seconds, machine="another", host="node2", process=17)
    before = lock.read_text()
    with pytest.raises(HeldError, match="process 17 on node2"), holding(tmp_path):
        pass
    assert lock.read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["running.lock"]


def test_a_run_whose_holder_on_another_machine_died_is_run_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder_module, "_SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(holder_module, "DEAD_AFTER_SECONDS", 3.0)
    monkeypatch.setattr("sbeval.sweep.schedule.DEAD_AFTER_SECONDS", 3.0)
    (tmp_path / "one" / "t").mkdir(parents=True)
    write_lock(tmp_path / "one" / "t", 0.0, machine="another", host="node2")
    assert run_sweep(sweep(tmp_path, "one", "two")) == []
    assert len((tmp_path / "started.txt").read_text().splitlines()) == 2


def test_a_holder_shows_that_it_lives_and_ends_its_run_where_another_took_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder_module, "HEARTBEAT_SECONDS", 0.05)
    lost = threading.Event()
    with holding(tmp_path, lost.set):
        lock = tmp_path / "running.lock"
        os.utime(lock, (1.0, 1.0))
        while lock.stat().st_mtime < time.time() - 60:
            time.sleep(0.01)
        assert not lost.is_set()
        write_lock(tmp_path, 0.0, machine="another", claim="theirs")
        assert lost.wait(10)
    kept = read_holder(lock)
    assert kept is not None
    assert kept.claim == "theirs"


def test_of_many_that_want_a_run_at_once_one_gets_it(tmp_path: Path) -> None:
    write_lock(tmp_path, 0.0, process=dead_process())
    code = (
        "import sys, time, pathlib\n"
        "from sbeval.sweep.holder import HeldError, holding\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "while not (folder / 'go').exists(): pass\n"
        "try:\n"
        "    with holding(folder): print('mine', flush=True); sys.stdin.read()\n"
        "except HeldError: print('held', flush=True)\n"
    )
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", code, str(tmp_path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started = [stack.enter_context(subprocess.Popen(command, text=True, **pipes)) for _ in range(4)]
        (tmp_path / "go").touch()
        said = [process.stdout.readline().strip() for process in started if process.stdout]
    assert sorted(said) == ["held"] * 3 + ["mine"]


def test_a_file_system_without_links_has_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with holding(tmp_path):
        found = read_holder(tmp_path / "running.lock")
        assert found is not None
        assert found.process == os.getpid()
        with pytest.raises(HeldError, match=f"process {os.getpid()} on "), holding(tmp_path):
            pass
    assert not list(tmp_path.iterdir())
