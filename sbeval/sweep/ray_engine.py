"""Runs of a sweep as tasks of a Ray cluster. Imported only where one is asked for, and needs the extra sbeval[ray]."""

import contextlib
import dataclasses
import logging
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sbeval.errors import UserError, first_line
from sbeval.hub_names import local_path
from sbeval.keeping.writing import told, unfinished
from sbeval.sweep.attempt import Outcome, attempt
from sbeval.sweep.definition import PlannedRun, Sweep

# a node that dies, and processes that are told to end with it
_MOST_TRIES = 4
_NODE_SECONDS = 120.0
# a node that nothing is heard of ends its runs by then
_LOCK_SECONDS = 120.0
_ANSWER_SECONDS = 20.0
_WAIT_SECONDS = 60.0
_HOST_AND_PORT = re.compile(r"(?:ray://)?([^/]+):(\d{1,5})")
# numbers depend on how many threads add them up, and Ray sets it
_THREADS = "OMP_NUM_THREADS"


def run_on_cluster(
    address: str, sweep: Sweep, runs: Sequence[PlannedRun], say: Callable[[PlannedRun, str], None], *, replace: bool
) -> Iterator[tuple[PlannedRun, Outcome]]:
    """Hands all runs to a cluster, of which each node sees the same folders, and yields how each ended.

    A run is a task. Ray tries it again elsewhere when its node dies, and so is one whose processes were told to end, as
    on a node that goes; a run that fails has an outcome like any other, and is not tried again.

    The address "local" starts a cluster on this machine, and "auto" is the one that Ray finds.

    Raises:
        UserError: Ray is not installed, no cluster answers, a run needs more GPUs than a node has, or a node does not
            see the folder of results.
    """
    ray = _connected(address)
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)  # which ends what is running there
        output = local_path(sweep.output).absolute()
        with told(output):
            output.mkdir(parents=True, exist_ok=True)
        place = (str(Path.cwd()), str(stack.enter_context(unfinished(output / "shared")).parent))
        nodes = [node for node in ray.nodes() if node["Alive"]]
        most_gpus = max((int(node["Resources"].get("GPU", 0)) for node in nodes), default=0)
        for run in runs:
            if (run.gpus or 0) > most_gpus:
                raise UserError(
                    f"Expected at most {most_gpus} GPUs a run, which is what the largest node of the cluster has, "
                    f"found gpus: {run.gpus} of run {run.name!r}: correct that in the sweep file."
                )
        _check_nodes(ray, nodes, place)
        how = {"launcher": sweep.launcher, "replace": replace, "threads": os.environ.get(_THREADS)}
        remote = ray.remote(max_retries=_MOST_TRIES, retry_exceptions=False)(_attempt)
        tries: Counter[str] = Counter()
        running: dict[Any, PlannedRun] = {}

        def start(run: PlannedRun) -> None:
            gpus = min(1, most_gpus) if run.gpus is None else run.gpus
            tries[str(run)] += 1
            task = remote.options(num_gpus=gpus, num_cpus=1, name=str(run))
            running[task.remote(place, dataclasses.replace(run, gpus=gpus), **how)] = run

        for run in runs:
            say(run, f"given to the cluster, log in {run.log_file}")
            start(run)
        while running:
            done, _ = ray.wait(list(running), num_returns=1, timeout=_WAIT_SECONDS)
            for task in done:
                run = running.pop(task)
                try:
                    outcome = ray.get(task)
                except ray.exceptions.RayError as error:
                    outcome = Outcome("failed", f"the cluster lost it ({first_line(error)})")
                if outcome.state == "interrupted" and tries[str(run)] < _MOST_TRIES:
                    start(run)
                else:
                    yield run, outcome


def _check_nodes(ray: Any, nodes: Sequence[dict[str, Any]], place: tuple[str, str]) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # as Ray itself, an extra

    task = ray.remote(num_cpus=0, max_retries=0)(_what_is_not_seen)
    placed = {node["NodeID"]: NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes}
    asked = [task.options(scheduling_strategy=node).remote(*place) for node in placed.values()]
    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_NODE_SECONDS)
    for answer in ready:
        with contextlib.suppress(ray.exceptions.RayError):  # a node that died since
            if (sentence := ray.get(answer)) is not None:
                raise UserError(sentence)


def _connected(address: str) -> Any:
    try:
        import ray  # an extra
    except ImportError as error:
        raise UserError(
            f"Expected the package ray for --ray {address}, found none: pip install 'sbeval[ray]', or leave --ray out "
            "to run one after another."
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
    place: tuple[str, str], run: PlannedRun, *, launcher: Sequence[str] | None, replace: bool, threads: str | None
) -> Outcome:
    """Tries a run on the node where this is called."""
    if (sentence := _what_is_not_seen(*place)) is not None:
        return Outcome("failed", sentence)
    os.chdir(place[0])
    os.environ.pop(_THREADS, None)
    variables = {} if threads is None else {_THREADS: threads}
    return attempt(run, launcher, replace=replace, variables=variables, lock_seconds=_LOCK_SECONDS)
