"""Runs a sweep: one process a run, so that one that crashes or runs out of memory does not end the others."""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from sbeval.ending import say_next
from sbeval.errors import UserError
from sbeval.results import outputs
from sbeval.sweep.child import run_to_end
from sbeval.sweep.definition import Sweep
from sbeval.sweep.plan import PlannedRun, check_checkpoint, plan
from sbeval.sweep.results import holds_results, in_the_way, inputs_record, other_settings, what_is_missing

_LOG_TAIL_BYTES = 65_536
_ERROR_LINE = re.compile(r"([A-Za-z_]\w*\.)*\w*(Error|Exception|Interrupt|Exit)\b")
# said by a launcher about the process whose own error stands above
_LAUNCHER_LINE = re.compile(r"subprocess\.CalledProcessError|torch\.distributed\.elastic")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A run without results, and why."""

    run: PlannedRun
    reason: str


def run_sweep(
    sweep: Sweep,
    *,
    dry_run: bool = False,
    check: Callable[[dict[str, Any]], None] | None = None,
    replace: bool = False,
) -> list[Failure]:
    """Runs what is not there yet and complete, goes on after a failed run, and prints what it does.

    Args:
        sweep: the sweep.
        dry_run: only print what would be run.
        check: called by a dry run with each configuration to be run; raises a `UserError` for one that cannot start.
        replace: where a run's folder holds anything else, move that aside and run.

    Returns:
        The failed runs.
    """
    runs = plan(sweep)
    failures: list[Failure] = []
    done = complete = 0
    for number, run in enumerate(runs, start=1):
        print(f"[{number}/{len(runs)}] {run}: ", end="", flush=True)
        missing = None
        try:
            missing = what_is_missing(run)
            there = missing is None and other_settings(run) is None
            found = None if there or replace else in_the_way(run)
            reason = None if found is None else _refusal(found)
            if dry_run and check is not None and not there and reason is None:
                check_checkpoint(run.config)
                check(run.config)
        except UserError as error:
            there, reason = False, str(error)
        except OSError as error:
            there, reason = False, f"its folder {run.folder} cannot be read ({error.strerror}): check its permissions"
        if there:
            complete += 1
            print("complete", flush=True)
        elif reason is not None:
            failures.append(Failure(run=run, reason=reason))
            print(f"not run: {reason}", flush=True)
        elif dry_run:
            begun = missing is not None and run.folder.is_dir()
            print(f"to run{f' ({missing})' if begun else ''}", flush=True)
        else:
            print(f"running, log in {run.log_file}", flush=True)
            began = time.monotonic()
            failed = _run(run, sweep.launcher, replace=replace)
            seconds = time.monotonic() - began
            print(f"    {'failed' if failed else 'done'} after {seconds:.0f} s", flush=True)
            if failed:
                failures.append(Failure(run=run, reason=failed))
            else:
                done += 1
    _summary(sweep, len(runs), done, complete, failures, dry_run=dry_run)
    return failures


def command(run: PlannedRun, launcher: Sequence[str] | None) -> list[str]:
    """Returns the command of a run.

    Python gets -P, since the current folder may be a checkout, whose `sbeval` is not the installed one.
    """
    start = [sys.executable, "-P"] if launcher is None else list(launcher)
    return [*start, "-m", "sbeval", "run", "--config", str(run.config_file)]


def _refusal(found: str) -> str:
    return f"{found}: move that away, use another output folder, or have it moved aside with --replace"


def _run(run: PlannedRun, launcher: Sequence[str] | None, *, replace: bool) -> str | None:
    """Runs one run; returns why it has no results, None where it has them."""
    try:
        if replace and os.path.lexists(run.folder) and not run.folder.is_dir():
            outputs.set_aside(run.folder, reads=_reads(run.config))
        with _alone(run):
            # again, since another sweep may have been at it a moment ago
            if what_is_missing(run) is None and other_settings(run) is None:
                return None
            found = in_the_way(run)
            if found is not None and not replace:
                return _refusal(found)
            if found is None and not holds_results(run.folder):
                return _run_alone(run, launcher)
            aside = outputs.set_aside(run.folder, reads=_reads(run.config))
            (aside / outputs.LOCK).unlink()
            with _alone(run):
                return _run_alone(run, launcher)
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"its folder {run.folder} cannot be written ({error.strerror}): use another output folder"


def _reads(config: Any) -> list[Path]:
    """Returns the files and folders that a run's settings name, however deep in them."""
    if isinstance(config, dict):
        return [path for key, value in config.items() if key != "output_path" for path in _reads(value)]
    if isinstance(config, list | tuple):
        return [path for value in config for path in _reads(value)]
    return [Path(config)] if isinstance(config, str) and os.path.lexists(config) else []


@contextlib.contextmanager
def _alone(run: PlannedRun) -> Iterator[None]:
    run.folder.mkdir(parents=True, exist_ok=True)
    with outputs.alone_in(run.folder / outputs.LOCK):
        yield


def _run_alone(run: PlannedRun, launcher: Sequence[str] | None) -> str | None:
    from sbeval.corpora.cache import whole_file  # brings numpy along, and a sweep is planned without it

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
            code = run_to_end(started, log)
        except OSError as error:
            return f"the command {started[0]!r} does not start ({error.strerror})"
    if code == 0:
        if (missing := what_is_missing(run)) is not None:
            return f"it ended well, but {missing}"
        now = inputs_record(run)  # once: what is compared is what is written
        if (changed := other_settings(run, now)) is not None:
            return f"it ended well, but what it depends on changed while it ran ({changed})"
        with whole_file(run.inputs_file, "the record of a run", remedy="use another output folder") as part:
            part.write_text(now, encoding="utf-8")
        return None
    ended = f"ended by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
    return f"{ended}: {_last_error(run)}"


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


def _summary(sweep: Sweep, total: int, done: int, complete: int, failures: Sequence[Failure], *, dry_run: bool) -> None:
    counts = [f"{done} done", f"{complete} complete before"]
    if dry_run:
        counts = [f"{total - complete - len(failures)} to run", f"{complete} complete"]
    if failures:
        counts.append(f"{len(failures)} {'blocked' if dry_run else 'failed'}")
    print(f"\n{total} run{'' if total == 1 else 's'}: {', '.join(counts)}")
    width = max(shutil.get_terminal_size((120, 24)).columns, 120)
    for failure in failures:
        reason = failure.reason if len(failure.reason) <= 4 * width else f"{failure.reason[: 4 * width]} ..."
        print(f"{failure.run}: {reason}" + ("" if dry_run else f" (log: {failure.run.log_file})"))
    if dry_run and not failures:
        say_next("the same without --dry-run")
    elif not dry_run and done + complete:
        say_next(f"sbeval report {shlex.quote(sweep.output)}")
