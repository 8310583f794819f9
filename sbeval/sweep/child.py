"""One run's process and all it starts: they end when the sweep is ended."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

# torch's launcher gives its own workers 30 seconds
SECONDS_TO_END = 40.0
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class SweepEnded(SystemExit):
    """This process was asked to end; the exit code is the one a shell gives for the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self._name = signal.Signals(number).name

    def __str__(self) -> str:
        return f"ended by {self._name}"


def run_to_end(command: Sequence[str], log: IO[str]) -> int:
    """Runs a command with its output in a log; returns its exit code, negative for the signal that ended it.

    The command leads a process group of its own. Where this process is interrupted or asked to end (SIGINT, SIGTERM,
    SIGHUP), the whole group is asked to end first, since a launcher's workers would otherwise keep the GPU; what is
    left after `SECONDS_TO_END` seconds is killed.

    Args:
        command: program and arguments.
        log: open file for standard output and standard error.

    Raises:
        OSError: the command does not start.
        SweepEnded: this process was asked to end.
    """
    with _raising_when_asked_to_end():
        # unbuffered, so that the log ends with what was said last
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0)
        try:
            return child.wait()
        except BaseException:
            _end_group(child)
            raise


def _end_group(child: "subprocess.Popen[bytes]") -> None:
    try:
        _signal_group(child, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(SECONDS_TO_END)
    finally:
        _signal_group(child, signal.SIGKILL)
        child.wait()


def _signal_group(child: "subprocess.Popen[bytes]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


@contextlib.contextmanager
def _raising_when_asked_to_end() -> Iterator[None]:
    """Turns signals whose default ends this process at once into `SweepEnded`; only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise SweepEnded(number)

    # a signal that is ignored, as under nohup, stays ignored
    before = {number: signal.getsignal(number) for number in _ENDING}
    before = {number: handler for number, handler in before.items() if handler in _DEFAULTS}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
