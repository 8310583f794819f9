"""One run, tried once in its folder, as a process that ends with all it started when this one is ended or killed."""

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
from sbeval.processes.signals import raising_when_asked_to_end
from sbeval.sweep.definition import PlannedRun
from sbeval.sweep.results import holds_results, in_the_way, inputs_record, other_settings, what_is_missing

Child = subprocess.Popen[bytes]
# torch's launcher gives its own workers 30 seconds
SECONDS_TO_END = 40.0
_PR_SET_PDEATHSIG = 1
_C_LIBRARY = ctypes.CDLL(None)
_LOG_TAIL_BYTES = 65_536
_ERROR_LINE = re.compile(r"([A-Za-z_]\w*\.)*\w*(Error|Exception|Interrupt|Exit)\b")
# said by a launcher about the process whose own error stands above
_LAUNCHER_LINE = re.compile(r"subprocess\.CalledProcessError|torch\.distributed\.elastic")
_ASKED_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Outcome(NamedTuple):
    """How an attempt at a run ended, and why it has no results.

    It is "complete" where another process had run it, and "interrupted" where it was asked to end.
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
    """Runs one run with a launcher or this Python, if nobody else is at it and nothing is in its way.

    With `replace` whatever else its folder holds is moved aside. `variables` are added to the environment, and another
    process that is at it is waited for up to `lock_seconds`.
    """
    began = time.monotonic()
    try:
        outcome = _outcome(run, launcher, replace, variables or {}, lock_seconds)
    except UserError as error:
        outcome = Outcome("failed", str(error))
    except OSError as error:
        reason = f"Expected to write to {run.folder}, found: {error.strerror}: mend that, or use another output folder"
        outcome = Outcome("failed", reason)
    return outcome._replace(seconds=time.monotonic() - began)


@contextlib.contextmanager
def alone_in(folder: Path, seconds: float = 0.0) -> Iterator[None]:
    """Holds a folder, made where it is missing, as long as the block runs and this process lives.

    Raises:
        UserError: another process holds it, and still does after so many seconds.
        OSError: it cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    try:
        held = FileLock(path).acquire(timeout=seconds)
    except Timeout:
        raise UserError(
            f"Expected no other sweep at work in {folder}, found one: wait until it has ended, or use another output "
            "folder."
        ) from None
    with held:
        made = path.stat()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                if os.path.samestat(made, path.stat()):  # the folder may have been moved aside, with the lock in it
                    path.unlink()


def command(run: PlannedRun, launcher: Sequence[str] | None) -> list[str]:
    """Returns the command of a run.

    Python gets -P, since the current folder may be a checkout, whose `sbeval` is not the installed one.
    """
    start = [sys.executable, "-P"] if launcher is None else list(launcher)
    return [*start, "-m", "sbeval", "run", "--config", str(run.config_file)]


def refusal(obstacle: str) -> str:
    """Returns why a run is not run, from what `in_the_way` named."""
    return f"{obstacle}: move that away, use another output folder, or have it moved aside with --replace"


def _outcome(
    run: PlannedRun, launcher: Sequence[str] | None, replace: bool, variables: Mapping[str, str], lock_seconds: float
) -> Outcome:
    if replace and os.path.lexists(run.folder) and not run.folder.is_dir():
        set_aside(run.folder, reads=_reads(run.config))
    with alone_in(run.folder, lock_seconds):
        # again, since another sweep may have been at it a moment ago
        if what_is_missing(run) is None and other_settings(run) is None:
            return Outcome("complete")
        obstacle = in_the_way(run)
        if obstacle is not None and not replace:
            return Outcome("failed", refusal(obstacle))
        if obstacle is None and not holds_results(run.folder):
            return _run_alone(run, launcher, variables)
        aside = set_aside(run.folder, reads=_reads(run.config))
        (aside / LOCK).unlink()
        with alone_in(run.folder):
            return _run_alone(run, launcher, variables)


def _reads(config: Any) -> list[Path]:
    """Returns the files and folders that a run's settings name, however deep in them."""
    if isinstance(config, dict):
        return [path for key, value in config.items() if key != "output_path" for path in _reads(value)]
    if isinstance(config, list | tuple):
        return [path for value in config for path in _reads(value)]
    return [Path(config)] if isinstance(config, str) and os.path.lexists(config) else []


def _run_alone(run: PlannedRun, launcher: Sequence[str] | None, variables: Mapping[str, str]) -> Outcome:
    def record(file: Path, text: str) -> None:
        with whole_file(file, "the record of a run", remedy="use another output folder") as unfinished:
            unfinished.write_text(text, encoding="utf-8")

    record(run.config_file, yaml.safe_dump(json.loads(json.dumps(run.config)), sort_keys=False))
    record(run.inputs_file, inputs_record(run))
    if run.log_file.exists() and not run.log_file.is_file():  # a FIFO would be waited for
        raise UserError(f"Expected to write the log of a run at {run.log_file}, found no file: move that away.")
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
            return Outcome("failed", f"it ended well, but {missing}")
        now = inputs_record(run)  # once: what is compared is what is written
        if (changed := other_settings(run, now)) is not None:
            return Outcome("failed", f"it ended well, but what it depends on changed while it ran ({changed})")
        record(run.inputs_file, now)
        return Outcome("done")
    ended = f"ended by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
    asked = any(code in (-number, 128 + number) for number in _ASKED_TO_END)
    return Outcome("interrupted" if asked else "failed", f"{ended}: {_last_error(run)}")


def _last_error(run: PlannedRun) -> str:
    """Returns the line of a log that says what went wrong: the last one of an exception, else the last."""
    with run.log_file.open("rb") as log:
        log.seek(max(0, run.log_file.stat().st_size - _LOG_TAIL_BYTES))
        text = log.read().decode("utf-8", "replace")
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip() and not _LAUNCHER_LINE.match(line)]
    errors = [line for line in lines if _ERROR_LINE.match(line) or line.startswith("Expected ")]
    return (errors or lines or ["it printed nothing"])[-1]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _run_to_end(command: Sequence[str], log: IO[Any], variables: Mapping[str, str]) -> int:
    """Returns a command's exit code, negative for the signal that ended it; it ends before this process does."""
    with raising_when_asked_to_end():
        child = start(command, log, variables)
        try:
            return child.wait()
        except BaseException:
            end([child])
            raise


def start(command: Sequence[str], log: IO[Any], variables: Mapping[str, str] | None = None) -> Child:
    """Starts a command that leads a process group of its own, with its output in a log.

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
