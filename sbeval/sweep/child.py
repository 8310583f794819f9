"""Processes that end, with all that they started, when this one is ended."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any

# torch's launcher gives its own workers 30 seconds
SECONDS_TO_END = 40.0
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class AskedToEnd(SystemExit):
    """This process was asked to end; the exit code is the one a shell gives for the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self._name = signal.Signals(number).name

    def __str__(self) -> str:
        return f"ended by {self._name}"


Child = subprocess.Popen[bytes]


def run_to_end(command: Sequence[str], log: IO[Any]) -> int:
    """Runs a command with its output in a log; returns its exit code, negative for the signal that ended it.

    Where this process is interrupted or asked to end, the command and all that it started end first (`end`).

    Args:
        command: program and arguments.
        log: open file for standard output and standard error.

    Raises:
        OSError: the command does not start.
        AskedToEnd: this process was asked to end.
    """
    with raising_when_asked_to_end():
        child = start(command, log)
        try:
            return child.wait()
        except BaseException:
            end([child])
            raise


def start(command: Sequence[str], log: IO[Any], variables: Mapping[str, str] | None = None) -> Child:
    """Starts a command that leads a process group of its own, with its output in a log.

    Args:
        command: program and arguments.
        log: open file for standard output and standard error.
        variables: added to this process's environment.

    Raises:
        OSError: the command does not start.
    """
    # unbuffered, so that the log ends with what was said last
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0)


def end(children: Sequence[Child]) -> None:
    """Asks process groups to end, since a launcher's workers would otherwise keep the GPU, and waits until they have.

    What is left after `SECONDS_TO_END` seconds is killed.
    """
    try:
        for child in children:
            _signal_group(child, signal.SIGTERM)
        last = time.monotonic() + SECONDS_TO_END
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, last - time.monotonic()))
    finally:
        for child in children:
            _signal_group(child, signal.SIGKILL)
            child.wait()


def _signal_group(child: Child, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


@contextlib.contextmanager
def raising_when_asked_to_end() -> Iterator[None]:
    """Turns signals whose default ends this process at once into `AskedToEnd`; only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(number: int, frame: FrameType | None) -> None:
        raise AskedToEnd(number)

    # a signal that is ignored, as under nohup, stays ignored
    before = {number: signal.getsignal(number) for number in _ENDING}
    before = {number: handler for number, handler in before.items() if handler in _DEFAULTS}
    for number in before:
        signal.signal(number, asked)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
