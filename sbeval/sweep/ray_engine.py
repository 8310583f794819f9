"""Runs a sweep as tasks of a Ray cluster. Imported only with --ray, since it needs the extra sbeval[ray]."""

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
from sbeval.keeping.writing import unfinished, write_errors_explained
from sbeval.sweep.attempt import Outcome, attempt
from sbeval.sweep.definition import PlannedRun, Sweep

# largest number of attempts at a run if its node dies, or if its processes get a signal because their node shuts down
_MOST_TRIES = 4
_NODE_SECONDS = 120.0
# a node that has lost contact ends its runs within this time, which frees their locks
_LOCK_SECONDS = 120.0
_ANSWER_SECONDS = 20.0
_WAIT_SECONDS = 60.0
_HOST_AND_PORT = re.compile(r"(?:ray://)?([^/]+):(\d{1,5})")
# Ray changes this variable, but results depend on the number of threads: a run gets the value from before
_THREADS = "OMP_NUM_THREADS"


def run_on_cluster(
    address: str,
    sweep: Sweep,
    runs: Sequence[PlannedRun],
    print_progress: Callable[[PlannedRun, str], None],
    *,
    replace: bool,
) -> Iterator[tuple[PlannedRun, Outcome]]:
    """Runs all runs as tasks of a cluster whose nodes share a file system, and yields the outcome of each.

    If a node dies, Ray repeats its runs on another node. A run that was interrupted by a signal, as on a node that
    shuts down, is repeated too. A run that fails is not.

    `address` is the address of a cluster. "local" starts a cluster on this machine; "auto" uses the one that Ray finds.

    Raises:
        UserError: Ray is not installed, no cluster answers, a run needs more GPUs than a node has, or a node cannot see
            the output folder.
    """
    ray = _connected(address)
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)  # also ends the tasks that are still running
        output = local_path(sweep.output).absolute()
        with write_errors_explained(output):
            output.mkdir(parents=True, exist_ok=True)
        # the current folder, and a temporary folder that a node can see only if it shares the output folder
        shared_folders = (str(Path.cwd()), str(stack.enter_context(unfinished(output / "shared")).parent))
        nodes = [node for node in ray.nodes() if node["Alive"]]
        most_gpus = max((int(node["Resources"].get("GPU", 0)) for node in nodes), default=0)
        for run in runs:
            if (run.gpus or 0) > most_gpus:
                raise UserError(
                    f"Run {run.name!r} needs {run.gpus} GPUs, but the largest node of the cluster has {most_gpus}: "
                    "lower its gpus in the sweep file."
                )
        _check_nodes(ray, nodes, shared_folders)
        options = {"launcher": sweep.launcher, "replace": replace, "threads": os.environ.get(_THREADS)}
        remote = ray.remote(max_retries=_MOST_TRIES, retry_exceptions=False)(_attempt)
        tries: Counter[str] = Counter()
        running: dict[Any, PlannedRun] = {}

        def start(run: PlannedRun) -> None:
            gpus = min(1, most_gpus) if run.gpus is None else run.gpus
            tries[str(run)] += 1
            task = remote.options(num_gpus=gpus, num_cpus=1, name=str(run))
            running[task.remote(shared_folders, dataclasses.replace(run, gpus=gpus), **options)] = run

        for run in runs:
            print_progress(run, f"submitted to the cluster, log in {run.log_file}")
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


def _check_nodes(ray: Any, nodes: Sequence[dict[str, Any]], shared_folders: tuple[str, str]) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # Ray is an optional dependency

    task = ray.remote(num_cpus=0, max_retries=0)(_unseen_folder)
    strategies = {node["NodeID"]: NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes}
    checks = [task.options(scheduling_strategy=strategy).remote(*shared_folders) for strategy in strategies.values()]
    ready, _ = ray.wait(checks, num_returns=len(checks), timeout=_NODE_SECONDS)
    for check in ready:
        with contextlib.suppress(ray.exceptions.RayError):  # the node died in the meantime
            if (sentence := ray.get(check)) is not None:
                raise UserError(sentence)


def _connected(address: str) -> Any:
    try:
        import ray  # an optional dependency: the extra sbeval[ray]
    except ImportError as error:
        raise UserError(
            f"--ray {address} needs the package ray, which is not installed: pip install 'sbeval[ray]', or remove "
            "--ray to run one run after another."
        ) from error
    # Ray sends usage statistics by default
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if (host_and_port := _HOST_AND_PORT.fullmatch(address)) is not None:  # Ray itself would try for minutes
            socket.create_connection((host_and_port[1], int(host_and_port[2])), _ANSWER_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RuntimeError, ValueError, OverflowError, OSError) as error:
        raise UserError(
            f"No Ray cluster answers at --ray {address} ({first_line(error)}): correct the address, or start one there "
            "with `ray start --head`."
        ) from error
    return ray


def _unseen_folder(current_folder: str, folder_in_output: str) -> str | None:
    """Returns an error message if this node cannot see the sweep's current or output folder, else None."""
    for path in (current_folder, folder_in_output):
        if not os.path.exists(path):
            where = current_folder if path == current_folder else str(Path(folder_in_output).parent)
            return (
                f"Every node of the cluster must see {where}, but {os.uname().nodename} does not: put checkpoints, "
                "texts and results in a folder that all nodes share, and start the sweep in a shared folder too."
            )
    return None


def _attempt(
    shared_folders: tuple[str, str],
    run: PlannedRun,
    *,
    launcher: Sequence[str] | None,
    replace: bool,
    threads: str | None,
) -> Outcome:
    """Attempts a run on the node that executes this Ray task."""
    if (sentence := _unseen_folder(*shared_folders)) is not None:
        return Outcome("failed", sentence)
    os.chdir(shared_folders[0])
    os.environ.pop(_THREADS, None)
    variables = {} if threads is None else {_THREADS: threads}
    return attempt(run, launcher, replace=replace, variables=variables, lock_seconds=_LOCK_SECONDS)
