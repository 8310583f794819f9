"""Two processes never execute the same run, but may execute different runs; a dead process holds no lock."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fresh_process import run, run_code
from sweep_inputs import lines, stub_command, stub_sweep, wait_for

from sbeval.errors import UserError
from sbeval.sweep.attempt import alone_in
from sbeval.sweep.definition import Sweep, SweepRun
from sbeval.sweep.execute import run_sweep

NAMES = ("one", "two", "three")


def sweep(folder: Path, behaviour: str = "write", gpus: int | None = None) -> Sweep:
    return stub_sweep(folder / "out", *NAMES, behaviour=behaviour, runs=(SweepRun(name="t", tasks=("t",), gpus=gpus),))


def command(folder: Path, behaviour: str, *options: str) -> list[str]:
    return [*stub_command(folder, *NAMES, behaviour=behaviour), *options]


def started(folder: Path) -> list[str]:
    return sorted(Path(line).parts[-3] for line in lines(folder / "out" / "started.txt"))


@pytest.mark.exhaustive
def test_a_second_sweep_ends_in_one_sentence_and_a_killed_one_goes_on_where_it_was(tmp_path: Path) -> None:
    assert run_sweep(sweep(tmp_path), only="one/t") == []
    (tmp_path / "out/started.txt").rename(tmp_path / "out/before.txt")
    with subprocess.Popen(command(tmp_path, "slow:600"), stdout=subprocess.DEVNULL) as first:
        try:
            wait_for(tmp_path / "out/started.txt")
            for options, place in (((), "out"), (("--run", "two/t"), "out/two/t")):
                second = run(command(tmp_path, "write", *options))
                assert second.returncode == 1
                assert f"Another sweep is running in {tmp_path / place}:" in second.stderr
                assert second.stderr.count("\n") == 1
            assert run_sweep(sweep(tmp_path), only="one/t") == [], "what is complete needs nobody's lock"
            assert started(tmp_path) == ["two"]
        finally:
            first.send_signal(signal.SIGKILL)
    assert run_sweep(sweep(tmp_path)) == []
    assert started(tmp_path) == ["three", "two", "two"]
    assert not list(tmp_path.rglob("running.lock"))


@pytest.mark.exhaustive
def test_runs_that_are_named_meet_in_one_folder(tmp_path: Path) -> None:
    commands = [command(tmp_path, "meet", "--run", f"{name}/t") for name in NAMES]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(words)) for words in commands]
        assert [process.wait(90) for process in processes] == [0, 0, 0]
    began, ended = zip(*(json.loads(line)[2:] for line in lines(tmp_path / "out/spans.jsonl")), strict=True)
    assert max(began) < min(ended)
    assert run_sweep(sweep(tmp_path)) == []
    assert started(tmp_path) == sorted(NAMES)


@pytest.mark.exhaustive
def test_a_run_that_another_is_at_fails_and_the_others_go_on(tmp_path: Path) -> None:
    over = threading.Event()

    def come_while_the_first_run_goes_on() -> None:
        wait_for(tmp_path / "out" / "started.txt")
        with alone_in(tmp_path / "out/two/t"):
            over.wait(60)

    other = threading.Thread(target=come_while_the_first_run_goes_on)
    other.start()
    try:
        failures = run_sweep(sweep(tmp_path, "slow:1"))
    finally:
        over.set()
        other.join()
    assert [str(failure.run) for failure in failures] == ["two/t"]
    assert "Another sweep is running" in failures[0].reason
    assert started(tmp_path) == ["one", "three"]


@pytest.mark.exhaustive
def test_of_many_that_want_a_folder_at_once_one_gets_it_also_after_a_lock_was_left_behind(tmp_path: Path) -> None:
    (tmp_path / "running.lock").write_text('{"process": 1, "host": "node2"}')  # by an earlier version, killed
    code = (
        "import sys, pathlib\n"
        "from sbeval.errors import UserError\n"
        "from sbeval.sweep.attempt import alone_in\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "while not (folder / 'go').exists(): pass\n"
        "try:\n"
        "    with alone_in(folder): print('mine', flush=True); sys.stdin.read()\n"
        "except UserError: print('held', flush=True)\n"
    )
    words, pipes = [sys.executable, "-c", code, str(tmp_path)], dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(words, text=True, **pipes)) for _ in range(4)]
        (tmp_path / "go").touch()
        said = [process.stdout.readline().strip() for process in processes if process.stdout]
    assert sorted(said) == ["held"] * 3 + ["mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["go"]


def test_a_folder_moved_aside_takes_its_lock_along_and_another_s_stays(tmp_path: Path) -> None:
    with alone_in(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "aside")
        with alone_in(tmp_path / "run"):
            pass
        held = alone_in(tmp_path / "run")
        held.__enter__()
    with pytest.raises(UserError, match="Another sweep is running"), alone_in(tmp_path / "run"):
        pass
    held.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--run", "four/t"), "Expected --run to name a run of the sweep, found 'four/t': name one of one/t, two/t"),
        (("--run", "one/t", "--follow", "."), "--run cannot be combined with a training to follow"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    process = run(command(tmp_path, "write", *options))
    assert process.returncode == 1
    assert words in process.stderr
    assert process.stderr.count("\n") == 1
    assert not started(tmp_path)


def test_a_name_is_that_of_one_run_or_of_one_that_all_checkpoints_go_through(tmp_path: Path) -> None:
    two = sweep(tmp_path).changed(runs=(SweepRun(name="t", tasks=("t",)), SweepRun(name="u", tasks=("t",))))
    run_sweep(two, only="two/u")
    assert started(tmp_path) == ["two"]
    run_sweep(two, only="u")
    assert started(tmp_path) == sorted(NAMES)


def test_a_run_of_no_gpus_sees_none(tmp_path: Path) -> None:
    assert run_sweep(sweep(tmp_path, "slow", gpus=0), only="one/t") == []
    assert json.loads((tmp_path / "out/spans.jsonl").read_text())[1] == ""


def test_the_engine_for_clusters_is_not_imported_where_it_is_not_used() -> None:
    code = "import sys, sbeval.sweep.execute; print('ray' in sys.modules, 'sbeval.sweep.ray_engine' in sys.modules)"
    assert run_code(code) == ["False False"]
