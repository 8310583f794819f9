"""Several processes of one job on this machine, which find each other as those of a launcher do."""

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

_LONGEST_SECONDS = 300


def run_ranks(function: Callable[..., object], *arguments: object, processes: int) -> None:
    """Calls `function(rank, *arguments)` in each of several processes and waits for all.

    The processes have the environment of this one. They are forked from one that has imported what takes long
    (`tests/conftest.py` names it), so that no test waits for that again.

    Raises:
        ProcessRaisedException: one of them failed; with its traceback.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
    started: Any = mp.start_processes(  # type: ignore[no-untyped-call]
        _run, ({**os.environ, **shared}, function, arguments), processes, join=False, start_method="forkserver"
    )
    last = time.monotonic() + _LONGEST_SECONDS
    while not started.join(timeout=1):
        if time.monotonic() > last:
            for process in started.processes:
                process.kill()


def _run(
    rank: int, environment: dict[str, str], function: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    os.environ.update({**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    function(rank, *arguments)
