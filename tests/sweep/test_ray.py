"""A sweep on a Ray cluster of three nodes: whatever dies in the middle, every run is there once, as one by one.

Needs the extra sbeval[ray]; `make test-ray` installs and runs it.
"""

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import snapshot
from sweep_inputs import lines, stub_command, stub_sweep, wait_for

from sbeval.errors import UserError
from sbeval.sweep.definition import Sweep, SweepRun
from sbeval.sweep.execute import run_sweep

ray = pytest.importorskip("ray", reason="the extra sbeval[ray] is not installed: make test-ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

NAMES = tuple(f"model{number}" for number in range(8))


@pytest.fixture
def cluster() -> Iterator[Any]:
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, num_gpus=0)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def settings(output: Path, *checkpoints: str, behaviour: str = "slow", **of_run: Any) -> Sweep:
    return stub_sweep(output, *checkpoints, behaviour=behaviour, runs=(SweepRun(name="t", tasks=("t",), **of_run),))


def left(folder: Path) -> dict[str, tuple[int, str]]:
    assert not list(folder.rglob("running.lock"))
    assert not list(folder.rglob("*.part"))
    whole = snapshot(folder, without=("started.txt", "spans.jsonl", "log.txt"))
    # a run that was ended in the middle is begun anew where it stood
    return {name: content for name, content in whole.items() if ".old-" not in name}


def test_nodes_that_die_and_come_and_a_driver_that_dies_lose_and_double_nothing(cluster: Any, tmp_path: Path) -> None:
    one_by_one, on_cluster = tmp_path / "one", tmp_path / "cluster"
    for folder, seconds in ((one_by_one, 0), (on_cluster, 3)):
        folder.mkdir()
        command = stub_command(folder, *NAMES, behaviour=f"slow:{seconds}")
        if not seconds:
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    command += ["--ray", cluster.address]
    started, ended = on_cluster / "out" / "started.txt", on_cluster / "out" / "spans.jsonl"

    with subprocess.Popen(command, cwd=on_cluster, stdout=subprocess.DEVNULL) as driver:
        wait_for(started, 3)
        victim = next(iter(cluster.worker_nodes))
        cluster.remove_node(victim, allow_graceful=False)
        cluster.add_node(num_cpus=1, num_gpus=0)
        wait_for(ended, 3)
        wait_for(started, 6)
        driver.send_signal(signal.SIGKILL)
    time.sleep(1)
    again = subprocess.run(command, cwd=on_cluster, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "8 runs: " in again.stdout
    assert left(on_cluster / "out") == left(one_by_one / "out")
    finished = [line.split(",")[0] for line in lines(ended)]
    assert len(set(finished)) == len(NAMES)
    assert len(list(on_cluster.rglob("results_*.json"))) == len(NAMES)


def test_a_run_that_fails_is_not_tried_again_and_one_that_is_ended_is(cluster: Any, tmp_path: Path) -> None:
    failures = run_sweep(settings(tmp_path / "out", "one", "broken", "two"), ray=cluster.address)
    assert [str(failure.run) for failure in failures] == ["broken/t"]
    assert failures[0].reason == "exit code 3: CUDAError: out of memory on device 0"
    assert sum("broken" in line for line in lines(tmp_path / "out" / "started.txt")) == 1
    (failure,) = run_sweep(settings(tmp_path / "ended", "one", behaviour="terminate"), ray=cluster.address)
    assert failure.reason.startswith("ended by SIGTERM")
    assert len(lines(tmp_path / "ended" / "started.txt")) == 4


def test_what_a_cluster_cannot_run_is_one_sentence(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"needs 2 GPUs, .* largest node .* has 0") as error:
        run_sweep(settings(tmp_path / "out", "one", gpus=2), ray=cluster.address)
    assert "\n" not in str(error.value)
    assert not ray.is_initialized()


def test_a_folder_no_node_sees_is_one_sentence(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a node of another machine has another file system; here the folder goes between the driver's look and the node's
    monkeypatch.setattr("sbeval.sweep.ray_engine.unfinished", _vanishing)
    with pytest.raises(UserError, match=r"Every node of the cluster must see .*, but .* does not") as error:
        run_sweep(settings(tmp_path / "out", "one"), ray=cluster.address)
    assert "\n" not in str(error.value)
    assert not lines(tmp_path / "out" / "started.txt")


class _vanishing:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Path:
        return self._path.with_name("elsewhere") / "shared"

    def __exit__(self, *_: object) -> None: ...


def spans(folder: Path) -> list[tuple[str, str, float, float]]:
    return [tuple(json.loads(line)) for line in lines(folder / "out" / "spans.jsonl")]


def test_each_of_several_runs_has_gpus_of_its_own(tmp_path: Path) -> None:
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 3})
    try:
        runs = tuple(SweepRun(name=f"gpus-{gpus}", tasks=("t",), gpus=gpus) for gpus in (None, 0, 2))
        sweep = settings(tmp_path / "out", "a", "b", behaviour="slow:2").changed(runs=runs)
        assert run_sweep(sweep, ray=cluster.address) == []
    finally:
        ray.shutdown()
        cluster.shutdown()
    given = spans(tmp_path)
    assert sorted(len(list(filter(None, gpus.split(",")))) for _, gpus, *_ in given) == [0, 0, 1, 1, 2, 2]
    overlaps = 0
    for (_, these, began, ended), (_, those, also_began, also_ended) in itertools.combinations(given, 2):
        if began < also_ended and also_began < ended:
            overlaps += 1
            assert not {*these.split(",")} & {*those.split(",")} - {""}
    assert overlaps


def test_one_machine_needs_no_cluster(tmp_path: Path) -> None:
    assert run_sweep(settings(tmp_path / "out", "one", "broken"), ray="local")[0].reason.startswith("exit code 3")
    assert [name for name, *_ in spans(tmp_path)] == ["one"]
    assert not ray.is_initialized()


def test_an_address_without_a_cluster_is_one_sentence(tmp_path: Path) -> None:
    os.environ.pop("RAY_ADDRESS", None)
    with pytest.raises(UserError, match=r"No Ray cluster answers at --ray 127\.0\.0\.1:1 \(") as error:
        run_sweep(settings(tmp_path / "out", "one"), ray="127.0.0.1:1")
    assert "\n" not in str(error.value)
