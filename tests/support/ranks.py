"""Processes forked from one that has done the slow imports (listed in `tests/conftest.py`) once for all tests."""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing as mp
from torch import distributed

_LONGEST_SECONDS = 300
# the process that all are forked from has it since its start, before triton is imported
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


def run_ranks(function: Callable[..., object], *arguments: object, processes: int) -> None:
    """Calls `function(rank, *arguments)` in each of several processes, which find each other, and waits for all.

    The processes have the environment of this one; where one fails, its traceback is in what is raised.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with mock.patch.dict(os.environ, _NO_GPU):
        environment = {**os.environ, **place, "WORLD_SIZE": str(processes)}
        started: Any = mp.start_processes(  # type: ignore[no-untyped-call]
            _run, (environment, function, arguments), processes, join=False, start_method="forkserver"
        )
    last = time.monotonic() + _LONGEST_SECONDS
    while not started.join(timeout=1):
        if time.monotonic() > last:
            for process in started.processes:
                process.kill()


def start(
    function: Callable[..., object], *arguments: object, environment: Mapping[str, str], folder: Path, log: Path
) -> BaseProcess:
    """Starts `function(*arguments)` in a process without a GPU, in a folder; the log has all that it prints."""
    process: BaseProcess = mp.get_context("forkserver").Process(  # type: ignore[no-untyped-call]
        target=_alone, args=(dict(environment), folder, log, function, arguments)
    )
    with mock.patch.dict(os.environ, _NO_GPU):
        process.start()
    return process


def sbeval(*arguments: str) -> None:
    from sbeval.__main__ import main

    sys.argv = ["sbeval", *arguments]
    main()


def _begin() -> None:
    import interpreted  # noqa: F401

    torch.set_num_threads(1)


def _alone(
    environment: dict[str, str], folder: Path, log: Path, function: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    os.environ.clear()
    os.environ.update({**environment, **_NO_GPU})
    os.chdir(folder)
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    _begin()
    function(*arguments)


def _run(
    rank: int, environment: dict[str, str], function: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    os.environ.update({**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    _begin()
    function(rank, *arguments)
    if distributed.is_initialized():  # the first process keeps the store, in which others may still be
        distributed.barrier()
