"""Runs a sweep: one process a run, so that one that crashes or runs out of memory does not end the others."""

import dataclasses
import functools
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from sbeval.commands.ending import say_next
from sbeval.errors import UserError
from sbeval.settings import Expected, as_whole, read_value
from sbeval.sweep.attempt import Outcome, attempt, refusal
from sbeval.sweep.child import Children
from sbeval.sweep.definition import Sweep
from sbeval.sweep.engine import Engine, Workers, check_gpus
from sbeval.sweep.gpus import visible_gpus
from sbeval.sweep.plan import PlannedRun, check_checkpoint, plan
from sbeval.sweep.results import in_the_way, other_settings, what_is_missing
from sbeval.sweep.schedule import go_through, longest_first

_Workers = Annotated[
    int | str,
    Expected("a whole number of at least 1, or auto", lambda value: value if value == "auto" else as_whole(value, 1)),
]


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
    workers: str | None = None,
    ray: str | None = None,
) -> list[Failure]:
    """Runs what is not there yet and complete, goes on after a failed run, and prints what it does.

    Args:
        sweep: the sweep.
        dry_run: only print what would be run.
        check: called by a dry run with each configuration to be run; raises a `UserError` for one that cannot start.
        replace: where a run's folder holds anything else, move that aside and run.
        workers: runs at a time on this machine, each with GPUs of its own; "auto" is what its GPUs are enough for. None
            is one after another.
        ray: address of a Ray cluster that runs them, or "local".

    Returns:
        The failed runs.

    Raises:
        UserError: workers or a cluster that cannot be, or runs that need more GPUs than there are.
    """
    runs = plan(sweep)
    open_engine = _engine(sweep, runs, replace=replace, workers=workers, ray=ray)
    numbers = {str(run): number for number, run in enumerate(runs, start=1)}
    failures: list[Failure] = []
    complete, to_run = 0, []

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
    outcomes: dict[str, int] = {}
    held: list[tuple[PlannedRun, str]] = []
    if to_run and not dry_run:
        in_order = to_run if workers is None and ray is None else longest_first(to_run)
        for run, outcome in go_through(in_order, open_engine(), say):
            outcomes[outcome.state] = outcomes.get(outcome.state, 0) + 1
            if outcome.state in ("failed", "interrupted"):
                failures.append(Failure(run=run, reason=outcome.reason))
            elif outcome.state == "held":
                held.append((run, outcome.reason))
    complete += outcomes.get("complete", 0)
    failures.sort(key=lambda failure: numbers[str(failure.run)])
    _summary(sweep, len(runs), outcomes.get("done", 0), complete, failures, held, dry_run=dry_run)
    return failures


def _look_at(
    run: PlannedRun, check: Callable[[dict[str, Any]], None] | None, *, replace: bool
) -> tuple[bool, str | None, str | None]:
    """Returns whether a run is complete, why it cannot run, and what its folder lacks."""
    missing = None
    try:
        missing = what_is_missing(run)
        there = missing is None and other_settings(run) is None
        found = None if there or replace else in_the_way(run)
        reason = None if found is None else refusal(found)
        if check is not None and not there and reason is None:
            check_checkpoint(run.config)
            check(run.config)
    except UserError as error:
        return False, str(error), missing
    except OSError as error:
        return False, f"its folder {run.folder} cannot be read ({error.strerror}): check its permissions", missing
    return there, reason, missing


def _engine(
    sweep: Sweep, runs: Sequence[PlannedRun], *, replace: bool, workers: str | None, ray: str | None
) -> Callable[[], Engine]:
    """Checks what is to run a sweep, and returns what starts it."""
    if ray is not None:
        if workers is not None:
            raise UserError("Expected --workers or --ray, found both: a Ray cluster decides how many run at a time.")
        from sbeval.sweep.ray_engine import RayEngine

        return functools.partial(RayEngine, ray, sweep, runs, replace=replace)
    count = read_value(_Workers, 1 if workers is None else workers, name="--workers")
    gpus = visible_gpus() if workers is not None or any(run.gpus is not None for run in runs) else ()
    check_gpus(runs, len(gpus), "this machine")
    if count == "auto":
        count = max(1, len(gpus))
    share = 1 if workers is not None else len(gpus)

    def tried(run: PlannedRun, children: Children, variables: Mapping[str, str]) -> Outcome:
        return attempt(run, sweep.launcher, replace=replace, children=children, variables=variables)

    return functools.partial(Workers, tried, count, gpus, share)


def _summary(
    sweep: Sweep,
    total: int,
    done: int,
    complete: int,
    failures: Sequence[Failure],
    held: Sequence[tuple[PlannedRun, str]],
    *,
    dry_run: bool,
) -> None:
    counts = [f"{done} done", f"{complete} complete before"]
    if dry_run:
        counts = [f"{total - complete - len(failures)} to run", f"{complete} complete"]
    if held:
        counts.append(f"{len(held)} held")
    if failures:
        counts.append(f"{len(failures)} {'blocked' if dry_run else 'failed'}")
    print(f"\n{total} run{'' if total == 1 else 's'}: {', '.join(counts)}")
    width = max(shutil.get_terminal_size((120, 24)).columns, 120)
    for run, holder in held:
        print(f"{run}: being run by {holder} (log: {run.log_file})")
    for failure in failures:
        reason = failure.reason if len(failure.reason) <= 4 * width else f"{failure.reason[: 4 * width]} ..."
        print(f"{failure.run}: {reason}" + ("" if dry_run else f" (log: {failure.run.log_file})"))
    if dry_run and not failures:
        say_next("the same without --dry-run")
    elif held:
        say_next("the same command again, once those that hold runs have ended")
    elif not dry_run and done + complete:
        say_next(f"sbeval report {shlex.quote(sweep.output)}")
