"""Runs a sweep: one process a run, so that one that crashes or runs out of memory does not end the others."""

import contextlib
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.keeping.writing import LOCK, told
from sbeval.processes.next_step import say_next
from sbeval.sweep.attempt import Outcome, alone_in, attempt, refusal
from sbeval.sweep.definition import PlannedRun, Sweep, check_checkpoint, plan
from sbeval.sweep.results import in_the_way, other_settings, what_is_missing


class Failure(NamedTuple):
    """A run without results, and why."""

    run: PlannedRun
    reason: str


def run_sweep(
    sweep: Sweep,
    *,
    only: str | None = None,
    dry_run: bool = False,
    check: Callable[[dict[str, Any]], None] | None = None,
    replace: bool = False,
    ray: str | None = None,
) -> list[Failure]:
    """Runs what is not there yet and complete, goes on after a failed run, and prints what it does.

    `only` names a run as it is printed, or one that every checkpoint goes through. A dry run prints what would be run
    and calls `check` with each configuration, which raises a `UserError` for one that cannot start. With `replace` what
    else a run's folder holds is moved aside. `ray` is the address of a cluster that runs several at a time, or "local".
    Returns the failed runs.

    Raises:
        UserError: no such run, another sweep is at work in the folder, or a cluster that cannot be.
    """
    planned = plan(sweep)
    runs = [run for run in planned if only in (None, str(run), run.name)]
    if not runs:
        names = ", ".join(map(str, planned))
        raise UserError.expected("--run to name a run of the sweep", found=f"{only!r}", remedy=f"name one of {names}")
    numbers = {str(run): number for number, run in enumerate(runs, start=1)}
    failures: list[Failure] = []
    complete = 0
    to_run = []

    def say(run: PlannedRun, text: str) -> None:
        print(f"[{numbers[str(run)]}/{len(runs)}] {run}: {text}", flush=True)

    for run in runs:
        there, reason, missing = _look_at(run, check if dry_run else None, replace=replace)
        if there:
            complete += 1
            say(run, "complete")
        elif reason is not None:
            failures.append(Failure(run=run, reason=reason))
            say(run, f"not run: {reason}")
        else:
            to_run.append(run)
            if dry_run:
                say(run, f"to run{f' ({missing})' if missing is not None and run.folder.is_dir() else ''}")
    states: Counter[str] = Counter()
    if to_run and not dry_run:
        with _no_other_sweep(sweep, to_run, whole=only is None, look=ray is None):
            for run, outcome in _outcomes(sweep, to_run, say, replace=replace, ray=ray):
                states[outcome.state] += 1
                failed = outcome.state in ("failed", "interrupted")
                say(run, f"{'failed' if failed else outcome.state} after {outcome.seconds:.0f} s")
                if failed:
                    failures.append(Failure(run=run, reason=outcome.reason))
    complete += states["complete"]
    failures.sort(key=lambda failure: numbers[str(failure.run)])
    _summary(sweep, len(runs), states["done"], complete, failures, dry_run=dry_run)
    return failures


def _look_at(
    run: PlannedRun, check: Callable[[dict[str, Any]], None] | None, *, replace: bool
) -> tuple[bool, str | None, str | None]:
    """Returns whether a run is complete, why it cannot run, and what its folder lacks."""
    missing = None
    try:
        missing = what_is_missing(run)
        there = missing is None and other_settings(run) is None
        obstacle = None if there or replace else in_the_way(run)
        reason = None if obstacle is None else refusal(obstacle)
        if check is not None and not there and reason is None:
            check_checkpoint(run.config)
            check(run.config)
    except UserError as error:
        return False, str(error), missing
    except OSError as error:
        return False, f"its folder {run.folder} cannot be read ({error.strerror}): check its permissions", missing
    return there, reason, missing


@contextlib.contextmanager
def _no_other_sweep(sweep: Sweep, runs: Sequence[PlannedRun], *, whole: bool, look: bool) -> Iterator[None]:
    """Keeps two sweeps out of one folder: a whole one holds it while the block runs.

    Named runs may meet there, since each run has a lock of its own (`attempt`); whether somebody is at one of them is
    said first with `look`. A cluster's nodes wait for each other instead.
    """
    with contextlib.ExitStack() as stack:
        if whole:
            with told(local_path(sweep.output)):
                stack.enter_context(alone_in(local_path(sweep.output)))
        for run in runs:
            if look and (run.folder / LOCK).is_file():
                with contextlib.suppress(OSError), alone_in(run.folder):  # what cannot be locked fails its run
                    pass
        yield


def _outcomes(
    sweep: Sweep, runs: Sequence[PlannedRun], say: Callable[[PlannedRun, str], None], *, replace: bool, ray: str | None
) -> Iterator[tuple[PlannedRun, Outcome]]:
    if ray is not None:
        from sbeval.sweep.ray_engine import run_on_cluster  # the extra is imported where it is asked for

        yield from run_on_cluster(ray, sweep, runs, say, replace=replace)
        return
    for run in runs:
        say(run, f"running, log in {run.log_file}")
        yield run, attempt(run, sweep.launcher, replace=replace)


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
