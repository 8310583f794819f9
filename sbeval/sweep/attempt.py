"""One attempt at a run: a child process whose files are in the run's folder.

When this process ends, the child process and the processes that it started are ended too.
"""

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import yaml
from filelock import FileLock, Timeout

from sbeval.errors import UserError
from sbeval.keeping.writing import LOCK, set_aside, whole_file
from sbeval.processes.signals import raising_on_signals
from sbeval.sweep.definition import PlannedRun
from sbeval.sweep.results import holds_results, in_the_way, inputs_record, other_settings, what_is_missing

Child = subprocess.Popen[bytes]
# longer than the 30 seconds that torchrun gives its workers to end
SECONDS_TO_END = 40.0
_PR_SET_PDEATHSIG = 1
_C_LIBRARY = ctypes.CDLL(None)
_LOG_TAIL_BYTES = 65_536
_ERROR_LINE = re.compile(r"([A-Za-z_]\w*\.)*\w*(Error|Exception|Interrupt|Exit)\b")
# the text of a `UserError`: what is wrong, a colon or semicolon, and what to do; no log line and no warning
_USER_ERROR_LINE = re.compile(r"Expected |(?!\d{4}-\d\d-\d\d|.*Warning: )\S.*[:;] [a-z]")
# a launcher's lines about a failed worker, whose own error is printed above them
_LAUNCHER_LINE = re.compile(r"subprocess\.CalledProcessError|torch\.distributed\.elastic")
_ASKED_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Outcome(NamedTuple):
    """How an attempt at a run ended.

    Attributes:
        state: "done"; "complete" if another process had already run the same run; "failed"; or "interrupted" (by a
            signal).
        reason: why there are no results, if the attempt failed or was interrupted.
        seconds: duration of the attempt.
    """

    state: Literal["done", "complete", "failed", "interrupted"]
    reason: str = ""
    seconds: float = 0.0


def attempt(
    run: PlannedRun,
    launcher: Sequence[str] | None,
    *,
    replace: bool,
    variables: Mapping[str, str] | None = None,
    lock_seconds: float = 0.0,
) -> Outcome:
    """Runs one run, unless it is complete, another process runs it, or its folder holds other files.

    Args:
        run: the run.
        launcher: command in front of `-m sbeval run`; None is this Python.
        replace: whether to move other files in the run's folder aside.
        variables: environment variables that are added.
        lock_seconds: how long to wait for another process that runs the same run.
    """
    began = time.monotonic()
    try:
        outcome = _outcome(run, launcher, replace, variables or {}, lock_seconds)
    except UserError as error:
        outcome = Outcome("failed", str(error))
    except OSError as error:
        reason = f"{run.folder} cannot be written to ({error.strerror}): change that, or use another output folder"
        outcome = Outcome("failed", reason)
    return outcome._replace(seconds=time.monotonic() - began)


@contextlib.contextmanager
def alone_in(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Locks a folder while the block runs; makes it if it is missing. The kernel frees the lock if this process dies.

    Raises:
        UserError: another process still holds the lock after `seconds`.
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    try:
        lock = FileLock(path).acquire(timeout=seconds)
    except Timeout:
        raise UserError(
            f"Another sweep is running in {folder}: wait until it has ended, or use another output folder."
        ) from None
    with lock:
        lock_stat = path.stat()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                # compared because another process may have moved the folder with the locked file aside
                if os.path.samestat(lock_stat, path.stat()):
                    path.unlink()


def command(run: PlannedRun, launcher: Sequence[str] | None) -> list[str]:
    """Returns the command line of a run.

    Python gets -P: it would otherwise import `sbeval` from the current folder, which may be another checkout.
    """
    start = [sys.executable, "-P"] if launcher is None else list(launcher)
    return [*start, "-m", "sbeval", "run", "--config", str(run.config_file)]


def refusal(obstacle: str) -> str:
    """Returns the reason for not starting a run; `obstacle` is a result of `in_the_way`."""
    return f"{obstacle}: move it away, use another output folder, or let --replace move it aside"


def _outcome(
    run: PlannedRun, launcher: Sequence[str] | None, replace: bool, variables: Mapping[str, str], lock_seconds: float
) -> Outcome:
    if replace and os.path.lexists(run.folder) and not run.folder.is_dir():
        set_aside(run.folder, reads=_reads(run.config))
    with alone_in(run.folder, lock_seconds):
        # checked again inside the lock: another sweep may just have finished this run
        if what_is_missing(run) is None and other_settings(run) is None:
            return Outcome("complete")
        obstacle = in_the_way(run)
        if obstacle is not None and not replace:
            return Outcome("failed", refusal(obstacle))
        if obstacle is None and not holds_results(run.folder):
            return _run_locked(run, launcher, variables)
        aside = set_aside(run.folder, reads=_reads(run.config))
        (aside / LOCK).unlink()
        with alone_in(run.folder):
            return _run_locked(run, launcher, variables)


def _reads(config: Any) -> list[Path]:
    """Returns the existing files and folders that a run's settings name, at any depth of nesting."""
    if isinstance(config, dict):
        return [path for key, value in config.items() if key != "output_path" for path in _reads(value)]
    if isinstance(config, list | tuple):
        return [path for value in config for path in _reads(value)]
    return [Path(config)] if isinstance(config, str) and os.path.lexists(config) else []


def _run_locked(run: PlannedRun, launcher: Sequence[str] | None, variables: Mapping[str, str]) -> Outcome:
    def record(file: Path, text: str) -> None:
        with whole_file(file, "the record of a run", remedy="use another output folder") as unfinished:
            unfinished.write_text(text, encoding="utf-8")

    record(run.config_file, yaml.safe_dump(json.loads(json.dumps(run.config)), sort_keys=False))
    record(run.inputs_file, inputs_record(run))
    if run.log_file.exists() and not run.log_file.is_file():  # opening a FIFO would block
        raise UserError(f"A run's log is written to {run.log_file}, which is not a regular file: move it away.")
    started = command(run, launcher)
    if run.gpus == 0:
        variables = {**variables, "CUDA_VISIBLE_DEVICES": ""}
    with run.log_file.open("w", encoding="utf-8") as log:
        log.write(f"{shlex.join(started)}\n")
        log.flush()
        try:
            code = _run_to_end(started, log, variables)
        except OSError as error:
            return Outcome("failed", f"the command {started[0]!r} does not start ({error.strerror})")
    if code == 0:
        if (missing := what_is_missing(run)) is not None:
            return Outcome("failed", f"it ended with exit code 0, but {missing}")
        now = inputs_record(run)  # one call, so that the compared and the written record are the same
        if (changed := other_settings(run, now)) is not None:
            return Outcome("failed", f"it ended with exit code 0, but its inputs changed while it ran ({changed})")
        record(run.inputs_file, now)
        return Outcome("done")
    ended = f"ended by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
    ended_by_signal = any(code in (-number, 128 + number) for number in _ASKED_TO_END)
    return Outcome("interrupted" if ended_by_signal else "failed", f"{ended}: {_last_error(run)}")


def _last_error(run: PlannedRun) -> str:
    """Returns the last line of the log that is the message of an exception or a `UserError`, or else its last line."""
    with run.log_file.open("rb") as log:
        log.seek(max(0, run.log_file.stat().st_size - _LOG_TAIL_BYTES))
        text = log.read().decode("utf-8", "replace")
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip() and not _LAUNCHER_LINE.match(line)]
    errors = [line for line in lines if _ERROR_LINE.match(line) or _USER_ERROR_LINE.match(line)]
    return (errors or lines or ["it printed nothing"])[-1]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _run_to_end(command: Sequence[str], log: IO[Any], variables: Mapping[str, str]) -> int:
    """Runs a command and returns its exit code, which is negative if a signal ended it.

    If this process is asked to end, it ends the command too.
    """
    with raising_on_signals():
        child = start(command, log, variables)
        try:
            return child.wait()
        except BaseException:
            end([child])
            raise


def start(command: Sequence[str], log: IO[Any], variables: Mapping[str, str] | None = None) -> Child:
    """Starts a command in its own process group, with stdout and stderr in a log.

    On Linux the kernel sends the command SIGTERM when this process dies.

    Raises:
        OSError: the command does not start.
    """
    # unbuffered, so that the last lines reach the log even if the process is killed
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
    """Asks the kernel to send this process SIGTERM when its parent thread ends (PR_SET_PDEATHSIG)."""
    _C_LIBRARY.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end(children: Sequence[Child]) -> None:
    """Sends SIGTERM to the children's process groups and waits for them; SIGKILL after `SECONDS_TO_END` seconds.

    The whole group gets the signal, since a launcher's workers would otherwise keep the GPU.
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
