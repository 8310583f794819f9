"""Two machines on loopback: the numbers equal those of one process, and a failed rank gives one error.

Each machine has two processes where it matters that some are neither alone nor first, one elsewhere: each process that
a launcher starts takes as long to start as all the rest.
"""

import atexit
import contextlib
import json
import os
import re
import socket
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks, sbeval, start
from torch import distributed
from torch.distributed import TCPStore

from sbeval.errors import UserError
from sbeval.processes import ranks
from sbeval.processes.launch import launch
from tests.model_adapters.runs import rank_that
from tests.model_adapters.small import Checkpoints, english

pytestmark = pytest.mark.exhaustive

HERE = str(Path(rank_that.__file__).parent)
MACHINES = 2
LONGEST_SECONDS = 300


@pytest.fixture
def evaluation(checkpoint: Checkpoints, tmp_path: Path) -> list[str]:
    """Returns the arguments of `sbeval run`."""
    (tmp_path / "text.txt").write_text(english())
    metadata = {"data_path": str(tmp_path / "text.txt"), "context_lengths": [16, 32]}
    return [
        *("--model_args", f"pretrained={checkpoint('stickbreaking')},dtype=float32", "--device", "cpu"),
        *("--tasks", "sb_text_stream,sb_text_fixed_target", "--metadata", json.dumps(metadata)),
    ]


def environment(folder: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SBEVAL")}
    own = {"SBEVAL_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": HERE}
    return kept | own | variables


def patient_launcher(*arguments: str) -> None:
    """Runs `sbeval launch`, which waits longer than a test for machines that do not report the error of a rank."""
    ranks._LOST_SECONDS = 2 * LONGEST_SECONDS
    sbeval(*arguments)


def on_two_machines(command: list[str], folder: Path, *, processes: int, **variables: str) -> list[tuple[int, str]]:
    """Returns exit code and output of each machine's launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = [f"--num_machines={MACHINES}", f"--num_processes={processes}", "--main_process_ip=127.0.0.1"]
    ended = []
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(MACHINES):
            launcher = ["launch", *options, f"--machine_rank={rank}", f"--main_process_port={port}"]
            log = folder / f"machine{rank}.log"
            variables_of_all = environment(folder, **variables)
            process = start(patient_launcher, *launcher, *command, environment=variables_of_all, folder=folder, log=log)
            stack.callback(process.kill)
            started.append(process)
        last = time.monotonic() + LONGEST_SECONDS
        for rank, process in enumerate(started):
            process.join(max(last - time.monotonic(), 0))
            text = (folder / f"machine{rank}.log").read_text()
            assert process.exitcode is not None, text
            ended.append((process.exitcode, text))
    return ended


def results(folder: Path) -> dict[str, object]:
    (file,) = folder.rglob("results_*.json")
    return json.loads(file.read_text())["results"]


def test_two_machines_give_the_numbers_of_one_process_to_the_bit(evaluation: list[str], tmp_path: Path) -> None:
    command = ["run", *evaluation, "--output_path"]
    log = tmp_path / "one.log"
    alone = start(sbeval, *command, "one", environment=environment(tmp_path), folder=tmp_path, log=log)
    alone.join()
    assert alone.exitcode == 0, log.read_text()
    ended = on_two_machines([*command, "four"], tmp_path, processes=4)
    assert [code for code, _ in ended] == [0, 0], "\n".join(text for _, text in ended)
    assert len(results(tmp_path / "one")) == 2
    assert results(tmp_path / "four") == results(tmp_path / "one")


@pytest.mark.parametrize(
    ("rank_that", "processes", "variables", "words"),
    [
        ("3 fails", 4, {}, rf"{re.escape(rank_that.SENTENCE)} \(rank 3 of 4, process "),
        ("1 fails", 4, {"RANKS_THAT_READ_LATE": "2 3"}, rf"{re.escape(rank_that.SENTENCE)} \(rank 1 of 4, process "),
        ("any raises", 4, {}, r"KeyError: 'of the package' \(rank \d of 4, process "),
        ("1 dies", 2, {}, "Rank 1, process .*ended with SIGKILL"),
        ("1 hangs", 2, {"SBEVAL_WAIT_SECONDS": "5"}, "Ranks waited 5 s for rank 1 of 2"),
        ("1 runs out", 2, {}, "Expected a prompt and an answer .* memory of 2 processes.*rank 1 of 2"),
    ],
)
def test_a_process_that_fails_is_killed_or_hangs_ends_all_with_one_sentence(
    rank_that: str,
    processes: int,
    variables: dict[str, str],
    words: str,
    evaluation: list[str],
    checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:
    if rank_that == "1 runs out":  # while ranks prefill one prompt together
        model = f"pretrained={checkpoint('stickbreaking')},dtype=float32,context_parallel=2,max_batch_tokens=256"
        metadata = json.dumps({"context_lengths": [1200], "num_samples": 2})
        evaluation = ["--model_args", model, "--device", "cpu", "--tasks", "sb_json_kv", "--metadata", metadata]
    command = ["-m", "rank_that", "run", *evaluation]
    ended = on_two_machines(command, tmp_path, processes=processes, RANK_THAT=rank_that, **variables)
    for code, text in ended:
        assert code == 1
        said = text.splitlines()[-1]
        assert re.match(words, said), text
        assert text.count(said) == 1
    assert sum(text.count("Traceback") for _, text in ended) == ("raises" in rank_that)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"LOCAL_RANK": "1"}, "The environment has LOCAL_RANK but not RANK, WORLD_SIZE, MASTER_ADDR: unset it"),
        ({"WORLD_SIZE": "2"}, "The environment has WORLD_SIZE but not RANK, LOCAL_RANK, MASTER_ADDR: unset it"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x"}, "RANK from 0 to below WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "RANK": "-1", "LOCAL_RANK": "0", "MASTER_ADDR": "x"}, "WORLD_SIZE=2, found -1"),
        ({"WORLD_SIZE": "2", "RANK": "", "LOCAL_RANK": "0", "MASTER_ADDR": "x"}, "has WORLD_SIZE but not RANK:"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "x"}, "a whole number in the environment variable MASTER_PORT, found 'x'"),
        ({"WORLD_SIZE": "two"}, "Expected a whole number in the environment variable WORLD_SIZE, found 'two'"),
    ],
)
def test_processes_that_cannot_meet_are_one_sentence_before_they_wait(
    given: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=words):
        ranks.find_processes()


def test_a_port_in_use_and_a_command_that_is_none_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBEVAL_LAUNCHED", "PYTHONSAFEPATH"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(UserError, match="run, train or extend after the launcher's options, found 'sweep'"):
        launch(["--num_processes", "2", "sweep", "x.yaml"])
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = str(used.getsockname()[1])
        first = ["--num_processes=4", "--num_machines=2", "--machine_rank=0", "--main_process_ip=127.0.0.1"]
        with pytest.raises(UserError, match=f"The port {port} for the processes is in use"):
            launch([*first, "--main_process_port", port, "run", "--tasks", "none"])


def test_no_thread_that_takes_python_s_lock_is_there_when_python_ends() -> None:
    """A thread that takes the GIL then would end a finished process with SIGABRT."""
    run_ranks(_ends_its_threads, processes=2)


def _ends_its_threads(rank: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    distributed.init_process_group("gloo")
    distributed.all_reduce(torch.ones(4))
    before = _threads()
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    ranks.watch()
    assert before.keys() < _threads().keys()
    assert any("gloo" in name for name in _threads().values())
    atexit._run_exitfuncs()
    left = _threads()
    assert left.keys() < before.keys()
    assert not any("gloo" in name for name in left.values())


def _threads() -> dict[str, str]:
    tasks = Path("/proc/self/task")
    return {task.name: (task / "comm").read_text() for task in tasks.iterdir()}
