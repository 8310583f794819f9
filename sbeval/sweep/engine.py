"""Engines that run a sweep's runs, and one: threads of this process that each wait for a child."""

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sbeval.errors import UserError
from sbeval.sweep.attempt import Outcome
from sbeval.sweep.child import Children
from sbeval.sweep.plan import PlannedRun

Attempt = Callable[[PlannedRun, Children, Mapping[str, str]], Outcome]


class Engine(Protocol):
    """Runs runs, several at a time.

    Attributes:
        at_a_time: how many run side by side if none needs more than its share.
        begins: what is reported of a started run.
    """

    at_a_time: int
    begins: str

    def has_room(self, run: PlannedRun) -> bool:
        """Whether a run can be started now."""

    def start(self, run: PlannedRun) -> None:
        """Starts a run, or hands it to who will."""

    def ended(self, seconds: float) -> list[tuple[PlannedRun, Outcome]]:
        """Waits until a run ends, or for so many seconds; returns the runs that ended since the last call."""

    def end(self) -> None:
        """Ends what is running."""


class Workers:
    """Runs of this machine, each with GPUs of its own.

    Args:
        attempt: tries a run as a child process, with variables for its environment.
        count: most runs at a time.
        gpus: those to give out; if there are none, each run sees what this process sees.
        share: GPUs of a run that names no number.
    """

    begins = "running"

    def __init__(self, attempt: Attempt, count: int, gpus: Sequence[str] = (), share: int = 1) -> None:
        self.at_a_time = min(count, len(gpus) // max(1, share)) if gpus else count
        self._attempt, self._count, self._gpus, self._free = attempt, count, gpus, list(gpus)
        self._share = share
        self._children = Children()
        self._threads = concurrent.futures.ThreadPoolExecutor(count, "run")
        self._running: dict[concurrent.futures.Future[Outcome], tuple[PlannedRun, list[str]]] = {}

    def has_room(self, run: PlannedRun) -> bool:
        """Whether a worker and enough GPUs are free."""
        return len(self._running) < self._count and self._needs(run) <= len(self._free)

    def start(self, run: PlannedRun) -> None:
        """Starts a run on the first GPUs that are free."""
        needed = self._needs(run)
        given, self._free = self._free[:needed], self._free[needed:]
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(given)} if self._gpus else {}
        self._running[self._threads.submit(self._attempt, run, self._children, variables)] = (run, given)

    def ended(self, seconds: float) -> list[tuple[PlannedRun, Outcome]]:
        """Waits as `Engine` says."""
        wait = concurrent.futures.wait(self._running, seconds, concurrent.futures.FIRST_COMPLETED)
        ended = []
        for future in wait.done:
            run, given = self._running.pop(future)
            self._free += given
            ended.append((run, future.result()))
        return ended

    def end(self) -> None:
        """Ends all runs and their threads."""
        self._children.end_all()
        self._threads.shutdown(cancel_futures=True)

    def _needs(self, run: PlannedRun) -> int:
        wanted = self._share if run.gpus is None else run.gpus
        return wanted if self._gpus else 0


def check_gpus(runs: Sequence[PlannedRun], most: int, where: str) -> None:
    """Refuses runs that ask for more GPUs than there are.

    Args:
        runs: of a sweep.
        most: GPUs that one run can have.
        where: what has them, for the message.

    Raises:
        UserError: naming the first.
    """
    for run in runs:
        if (run.gpus or 0) > most:
            raise UserError(
                f"Expected at most {most} GPUs a run, which is what {where} has, found gpus: {run.gpus} of run "
                f"{run.name!r}: correct that in the sweep file."
            )
