"""Executes a sweep: each run is a process of its own, so a run that crashes or runs out of memory ends no other run."""

import contextlib
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.keeping.writing import LOCK, write_errors_explained
from sbeval.processes.next_step import print_next_step
from sbeval.sweep.attempt import Outcome, alone_in, attempt, refusal
from sbeval.sweep.definition import PlannedRun, Sweep, check_checkpoint, plan
from sbeval.sweep.results import in_the_way, other_settings, what_is_missing


class Failure(NamedTuple):
    """A run that has no results, and the reason why not."""

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
    """Runs every run that has no complete results yet, goes on after failures, and prints progress.

    Args:
        sweep: the sweep.
        only: a run as the sweep prints it ("checkpoint/run"), or the name of a run, which then runs for all
            checkpoints; None means all runs.
        dry_run: whether to start no run and only print which runs would start.
        check: with `dry_run`, called with each configuration; raises a `UserError` if the run could not start.
        replace: whether to move other files in a run's folder aside.
        ray: address of a Ray cluster that runs several runs at a time, or "local"; None runs one after another.

    Returns:
        The failed runs.

    Raises:
        UserError: there is no such run, another sweep uses the output folder, or the cluster cannot be used.
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

    def print_progress(run: PlannedRun, text: str) -> None:
        print(f"[{numbers[str(run)]}/{len(runs)}] {run}: {text}", flush=True)

    for run in runs:
        is_complete, reason, missing = _state_of(run, check if dry_run else None, replace=replace)
        if is_complete:
            complete += 1
            print_progress(run, "complete")
        elif reason is not None:
            failures.append(Failure(run=run, reason=reason))
            print_progress(run, f"not run: {reason}")
        else:
            to_run.append(run)
            if dry_run:
                why = f" ({missing})" if missing is not None and run.folder.is_dir() else ""
                print_progress(run, f"to run{why}")
    states: Counter[str] = Counter()
    if to_run and not dry_run:
        with _no_other_sweep(sweep, to_run, lock_output=only is None, check_runs=ray is None):
            for run, outcome in _outcomes(sweep, to_run, print_progress, replace=replace, ray=ray):
                states[outcome.state] += 1
                failed = outcome.state in ("failed", "interrupted")
                print_progress(run, f"{'failed' if failed else outcome.state} after {outcome.seconds:.0f} s")
                if failed:
                    failures.append(Failure(run=run, reason=outcome.reason))
    complete += states["complete"]
    failures.sort(key=lambda failure: numbers[str(failure.run)])
    _print_summary(sweep, len(runs), states["done"], complete, failures, dry_run=dry_run)
    return failures


def _state_of(
    run: PlannedRun, check: Callable[[dict[str, Any]], None] | None, *, replace: bool
) -> tuple[bool, str | None, str | None]:
    """Returns whether a run is complete, the reason why it cannot run, and the reason why its results are incomplete.

    A reason is None if it does not apply.
    """
    missing = None
    try:
        missing = what_is_missing(run)
        is_complete = missing is None and other_settings(run) is None
        obstacle = None if is_complete or replace else in_the_way(run)
        reason = None if obstacle is None else refusal(obstacle)
        if check is not None and not is_complete and reason is None:
            check_checkpoint(run.config)
            check(run.config)
    except UserError as error:
        return False, str(error), missing
    except OSError as error:
        return False, f"its folder {run.folder} cannot be read ({error.strerror}): check its permissions", missing
    return is_complete, reason, missing


@contextlib.contextmanager
def _no_other_sweep(sweep: Sweep, runs: Sequence[PlannedRun], *, lock_output: bool, check_runs: bool) -> Iterator[None]:
    """Makes sure that no other sweep runs the same runs.

    With `lock_output`, which a whole sweep sets, the output folder is locked while the block runs. Sweeps with `--run`
    may share it, since `attempt` locks the folder of each run. With `check_runs`, an error is raised at once if another
    process is running one of the runs; on a cluster, attempts wait for each other instead.

    Raises:
        UserError: another sweep holds the output folder or a run's folder.
    """
    with contextlib.ExitStack() as stack:
        if lock_output:
            with write_errors_explained(local_path(sweep.output)):
                stack.enter_context(alone_in(local_path(sweep.output)))
        for run in runs:
            if check_runs and (run.folder / LOCK).is_file():
                with contextlib.suppress(OSError), alone_in(run.folder):  # a folder without access fails in `attempt`
                    pass
        yield


def _outcomes(
    sweep: Sweep,
    runs: Sequence[PlannedRun],
    print_progress: Callable[[PlannedRun, str], None],
    *,
    replace: bool,
    ray: str | None,
) -> Iterator[tuple[PlannedRun, Outcome]]:
    if ray is not None:
        from sbeval.sweep.ray_engine import run_on_cluster  # Ray is an optional dependency

        yield from run_on_cluster(ray, sweep, runs, print_progress, replace=replace)
        return
    for run in runs:
        print_progress(run, f"running, log in {run.log_file}")
        yield run, attempt(run, sweep.launcher, replace=replace)


def _print_summary(
    sweep: Sweep, total: int, done: int, complete: int, failures: Sequence[Failure], *, dry_run: bool
) -> None:
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
        print_next_step("the same without --dry-run")
    elif not dry_run and done + complete:
        print_next_step(f"sbeval report {shlex.quote(sweep.output)}")
