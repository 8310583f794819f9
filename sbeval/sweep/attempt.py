"""One run, tried once in its folder, by whichever process of whichever machine is to try it."""

import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from sbeval.errors import UserError
from sbeval.keeping.locks import LOCK
from sbeval.keeping.writing import set_aside
from sbeval.sweep.child import Children
from sbeval.sweep.holder import HeldError, holding
from sbeval.sweep.plan import PlannedRun
from sbeval.sweep.results import holds_results, in_the_way, inputs_record, other_settings, what_is_missing

_LOG_TAIL_BYTES = 65_536
_ERROR_LINE = re.compile(r"([A-Za-z_]\w*\.)*\w*(Error|Exception|Interrupt|Exit)\b")
# said by a launcher about the process whose own error stands above
_LAUNCHER_LINE = re.compile(r"subprocess\.CalledProcessError|torch\.distributed\.elastic")
_ASKED_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Outcome(NamedTuple):
    """How an attempt at a run ended.

    Attributes:
        state: "done"; "complete" where another process had run it; "failed"; "interrupted" where it was asked to end;
            "held" where another process is at it.
        reason: why it has no results, or who holds it; empty where it has them.
        seconds: how long it took.
    """

    state: Literal["done", "complete", "failed", "interrupted", "held"]
    reason: str = ""
    seconds: float = 0.0


def attempt(
    run: PlannedRun,
    launcher: Sequence[str] | None,
    *,
    replace: bool,
    children: Children,
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Runs one run, if nobody else is at it and nothing is in its way.

    Args:
        run: the run.
        launcher: command in front of `-m sbeval run`, None for this Python.
        replace: move aside whatever else its folder holds.
        children: to start it among.
        variables: added to the environment.
    """
    began = time.monotonic()
    outcome = _outcome(run, launcher, replace, children, variables)
    return outcome._replace(seconds=time.monotonic() - began)


def _outcome(
    run: PlannedRun,
    launcher: Sequence[str] | None,
    replace: bool,
    children: Children,
    variables: Mapping[str, str] | None,
) -> Outcome:
    try:
        if replace and os.path.lexists(run.folder) and not run.folder.is_dir():
            set_aside(run.folder, reads=_reads(run.config))
        with holding(run.folder, lost=lambda: children.end_one(str(run.log_file))):
            # again, since another sweep may have been at it a moment ago
            if what_is_missing(run) is None and other_settings(run) is None:
                return Outcome("complete")
            found = in_the_way(run)
            if found is not None and not replace:
                return Outcome("failed", refusal(found))
            if found is None and not holds_results(run.folder):
                return _run_alone(run, launcher, children, variables)
            aside = set_aside(run.folder, reads=_reads(run.config))
            (aside / LOCK).unlink()
            with holding(run.folder, lost=lambda: children.end_one(str(run.log_file))):
                return _run_alone(run, launcher, children, variables)
    except HeldError as held:
        return Outcome("held", str(held))
    except UserError as error:
        return Outcome("failed", str(error))
    except OSError as error:
        reason = f"Expected to write to {run.folder}, found: {error.strerror}: mend that, or use another output folder"
        return Outcome("failed", reason)


def command(run: PlannedRun, launcher: Sequence[str] | None) -> list[str]:
    """Returns the command of a run.

    Python gets -P, since the current folder may be a checkout, whose `sbeval` is not the installed one.
    """
    start = [sys.executable, "-P"] if launcher is None else list(launcher)
    return [*start, "-m", "sbeval", "run", "--config", str(run.config_file)]


def refusal(found: str) -> str:
    """Returns why a run is not run, from what `in_the_way` found."""
    return f"{found}: move that away, use another output folder, or have it moved aside with --replace"


def _reads(config: Any) -> list[Path]:
    """Returns the files and folders that a run's settings name, however deep in them."""
    if isinstance(config, dict):
        return [path for key, value in config.items() if key != "output_path" for path in _reads(value)]
    if isinstance(config, list | tuple):
        return [path for value in config for path in _reads(value)]
    return [Path(config)] if isinstance(config, str) and os.path.lexists(config) else []


def _run_alone(
    run: PlannedRun, launcher: Sequence[str] | None, children: Children, variables: Mapping[str, str] | None
) -> Outcome:
    from sbeval.keeping.writing import whole_file

    config = yaml.safe_dump(json.loads(json.dumps(run.config)), sort_keys=False)
    for file, text in ((run.config_file, config), (run.inputs_file, inputs_record(run))):
        with whole_file(file, "the record of a run", remedy="use another output folder") as part:
            part.write_text(text, encoding="utf-8")
    if run.log_file.exists() and not run.log_file.is_file():  # a FIFO would be waited for
        raise UserError(f"Expected to write the log of a run at {run.log_file}, found no file: move that away.")
    started = command(run, launcher)
    with run.log_file.open("w", encoding="utf-8") as log:
        log.write(f"{shlex.join(started)}\n")
        log.flush()
        try:
            code = children.run_to_end(started, log, variables)
        except OSError as error:
            return Outcome("failed", f"the command {started[0]!r} does not start ({error.strerror})")
    if code == 0:
        if (missing := what_is_missing(run)) is not None:
            return Outcome("failed", f"it ended well, but {missing}")
        now = inputs_record(run)  # once: what is compared is what is written
        if (changed := other_settings(run, now)) is not None:
            return Outcome("failed", f"it ended well, but what it depends on changed while it ran ({changed})")
        with whole_file(run.inputs_file, "the record of a run", remedy="use another output folder") as part:
            part.write_text(now, encoding="utf-8")
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
