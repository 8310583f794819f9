"""Processes that end, with all that they started, when this one is ended or killed."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from sbeval.commands.ending import raising_when_asked_to_end

# torch's launcher gives its own workers 30 seconds
SECONDS_TO_END = 40.0
_PR_SET_PDEATHSIG = 1
_C_LIBRARY = ctypes.CDLL(None)
Child = subprocess.Popen[bytes]


class Children:
    """The commands that several threads have running, so that one of them can end all."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._running: dict[str, Child] = {}
        self._ended = False

    def run_to_end(self, command: Sequence[str], log: IO[Any], variables: Mapping[str, str] | None = None) -> int:
        """Runs a command with its output in a log; returns its exit code, negative for the signal that ended it.

        Where this process is interrupted or asked to end, the command and all that it started end first (`end`).

        Args:
            command: program and arguments.
            log: open file for standard output and standard error.
            variables: added to this process's environment.

        Raises:
            OSError: the command does not start.
            AskedToEnd: this process was asked to end.
        """
        with raising_when_asked_to_end():
            with self._changing:
                if self._ended:
                    return -signal.SIGTERM
                child = start(command, log, variables)
                self._running[log.name] = child
            try:
                return child.wait()
            except BaseException:
                end([child])
                raise
            finally:
                with self._changing:
                    del self._running[log.name]

    def end_all(self) -> None:
        """Ends what is running, and lets nothing start any more."""
        with self._changing:
            self._ended = True
            running = list(self._running.values())
        end(running)

    def end_one(self, log: str) -> None:
        """Ends the command whose log has this path, if it is running."""
        with self._changing:
            child = self._running.get(log)
        if child is not None:
            end([child])


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
    return subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        process_group=0,
        preexec_fn=_ends_with_its_parent if sys.platform == "linux" else None,
    )


def _ends_with_its_parent() -> None:
    """Makes the kernel ask this process to end when the thread that started it has ended, and can no longer do so."""
    _C_LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


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
