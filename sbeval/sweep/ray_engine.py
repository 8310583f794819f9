"""Runs of a sweep as tasks of a Ray cluster. Imported only where one is asked for, and needs the extra sbeval[ray]."""

import contextlib
import logging
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sbeval.errors import UserError, first_line
from sbeval.keeping.writing import told, unfinished
from sbeval.sweep.attempt import Outcome, attempt
from sbeval.sweep.child import Children
from sbeval.sweep.definition import Sweep
from sbeval.sweep.engine import check_gpus
from sbeval.sweep.plan import PlannedRun

# a node that dies, and workers that are told to end with it
_MOST_TRIES = 4
_NODE_SECONDS = 120.0
_ANSWER_SECONDS = 20.0
_HOST_AND_PORT = re.compile(r"(?:ray://)?([^/]+):(\d{1,5})")
# numbers depend on how many threads add them up, and Ray sets it
_THREADS = "OMP_NUM_THREADS"


class RayEngine:
    """Runs of a Ray cluster, of which each node sees the same folders.

    A run is a task. Ray tries it again elsewhere when its node dies; a run that fails has an outcome like any other,
    and is not tried again.

    Args:
        address: of the cluster; "local" starts one on this machine, and "auto" is the one that Ray finds.
        sweep: whose runs they are.
        runs: all of them.
        replace: as of `attempt`.

    Raises:
        UserError: Ray is not installed, no cluster answers, a run needs more GPUs than a node has, or a node does not
            see the folder of results.
    """

    begins = "given to the cluster"

    def __init__(self, address: str, sweep: Sweep, runs: Sequence[PlannedRun], *, replace: bool) -> None:
        self._ray = _connected(address)
        self._open = contextlib.ExitStack()
        self._open.callback(self._ray.shutdown)
        try:
            output = Path(sweep.output).absolute()
            with told(output):
                output.mkdir(parents=True, exist_ok=True)
            seen = self._open.enter_context(unfinished(output / "shared")).parent
            nodes = [node for node in self._ray.nodes() if node["Alive"]]
            most = max((int(node["Resources"].get("GPU", 0)) for node in nodes), default=0)
            check_gpus(runs, most, "the largest node of the cluster")
            self._share = min(1, most)
            self.at_a_time = max(1, int(self._ray.cluster_resources().get("GPU" if most else "CPU", 1)))
            self._place = (str(Path.cwd()), str(seen))
            self._check(nodes)
        except BaseException:
            self._open.close()
            raise
        self._how = {"launcher": sweep.launcher, "replace": replace, "threads": os.environ.get(_THREADS)}
        self._task = self._ray.remote(max_retries=_MOST_TRIES, retry_exceptions=False)(_attempt)
        self._running: dict[Any, PlannedRun] = {}
        self._tries: dict[str, int] = {}

    def has_room(self, run: PlannedRun) -> bool:
        """Whether a run can be handed to the cluster: always, which then decides when and where it runs."""
        return True

    def start(self, run: PlannedRun) -> None:
        """Hands a run to the cluster."""
        gpus = self._share if run.gpus is None else run.gpus
        self._tries[str(run)] = self._tries.get(str(run), 0) + 1
        task = self._task.options(num_gpus=gpus, num_cpus=1, name=str(run))
        self._running[task.remote(self._place, run, gpus=gpus, **self._how)] = run

    def ended(self, seconds: float) -> list[tuple[PlannedRun, Outcome]]:
        """Waits as `Engine` says; a run whose processes were told to end, as on a node that goes, is tried again."""
        done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        ended = []
        for task in done:
            run = self._running.pop(task)
            try:
                outcome = self._ray.get(task)
            except self._ray.exceptions.RayError as error:
                outcome = Outcome("failed", f"the cluster lost it ({first_line(error)})")
            if outcome.state == "interrupted" and self._tries[str(run)] < _MOST_TRIES:
                self.start(run)
            else:
                ended.append((run, outcome))
        return ended

    def end(self) -> None:
        """Leaves the cluster, which ends what is running there."""
        self._open.close()

    def _check(self, nodes: Sequence[dict[str, Any]]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task = self._ray.remote(num_cpus=0, max_retries=0)(_what_is_not_seen)
        placed = {node["NodeID"]: NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes}
        asked = [task.options(scheduling_strategy=place).remote(*self._place) for place in placed.values()]
        ready, _ = self._ray.wait(asked, num_returns=len(asked), timeout=_NODE_SECONDS)
        for answer in ready:
            with contextlib.suppress(self._ray.exceptions.RayError):  # a node that died since
                if (sentence := self._ray.get(answer)) is not None:
                    raise UserError(sentence)


def _connected(address: str) -> Any:
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"Expected the package ray for --ray {address}, found none: pip install 'sbeval[ray]'."
        ) from error
    # nothing is sent to anybody
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if (named := _HOST_AND_PORT.fullmatch(address)) is not None:  # Ray itself would try for minutes
            socket.create_connection((named[1], int(named[2])), _ANSWER_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ValueError, OverflowError, OSError) as error:
        raise UserError(
            f"Expected a Ray cluster at --ray {address}, found: {first_line(error)}; correct the address, or start one "
            "there with `ray start --head`."
        ) from error
    return ray


def _what_is_not_seen(folder: str, seen: str) -> str | None:
    """Returns what this node lacks to run runs of a sweep, None where it lacks nothing."""
    for path in (folder, seen):
        if not os.path.exists(path):
            where = folder if path == folder else str(Path(seen).parent)
            return (
                f"Expected {where} on every node of the cluster, found that {os.uname().nodename} does not see it: put "
                "checkpoints, texts and results on a folder that all share, and start the sweep in one too."
            )
    return None


def _attempt(
    place: tuple[str, str],
    run: PlannedRun,
    *,
    gpus: int,
    launcher: Sequence[str] | None,
    replace: bool,
    threads: str | None,
) -> Outcome:
    """Tries a run on the node where this is called."""
    if (sentence := _what_is_not_seen(*place)) is not None:
        return Outcome("failed", sentence)
    os.chdir(place[0])
    os.environ.pop(_THREADS, None)
    variables = {} if threads is None else {_THREADS: threads}
    if gpus == 0:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    return attempt(run, launcher, replace=replace, children=Children(), variables=variables)
