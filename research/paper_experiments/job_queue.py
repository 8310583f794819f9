"""Runs jobs, each in a separate process, on the accelerators of one machine.

A job starts when the jobs it needs are done and a place is free: each GPU has as many places as asked for, since the
start-up of one process hides behind the work of another. Among jobs that can start, the one of the highest urgency
goes first, then the longest. A job that ended well leaves a mark and is not run again, so a queue that was killed goes
on where it was; jobs that resume by themselves (training) find their own states.
"""

import dataclasses
import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sbeval.processes.signals import raising_on_signals
from sbeval.sweep.attempt import Child, end, start

POLL_SECONDS = 0.1
ATTEMPTS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One process.

    Attributes:
        name: also that of its log.
        command: the command line, worked out when the job starts, so that it can rest on earlier jobs' results.
        needs: names of jobs that must be done before.
        estimated_seconds: the longer of two jobs starts first.
        urgency: jobs of a higher one start first.
        alone: give the job a GPU to itself, so that its timings mean something.
        unneeded: asked while the job waits and runs; once it says yes the job is ended and counts as done.
    """

    name: str
    command: Callable[[], Sequence[str]]
    needs: tuple[str, ...] = ()
    estimated_seconds: float = 0.0
    urgency: int = 0
    alone: bool = False
    unneeded: Callable[[], bool] = lambda: False


@dataclasses.dataclass(kw_only=True)
class Running:
    """A job under way."""

    job: Job
    gpu: int
    process: Child
    started: float
    line: list[str]


@raising_on_signals()
def run_queue(
    jobs: Sequence[Job],
    out: Path,
    *,
    gpus: int,
    places: int,
    max_seconds: float | None = None,
    environment: dict[str, str] | None = None,
) -> list[str]:
    """Runs the jobs.

    Args:
        jobs: all of them, those done before included.
        out: gets `logs/`, `done/` and `jobs.jsonl`, one line for each job that ended, with its seconds and exit code.
        gpus: accelerators, the first ones of `CUDA_VISIBLE_DEVICES` where that is set; 0 runs on the CPU, with `places`
            jobs at a time.
        places: jobs at a time on each.
        max_seconds: end the jobs still running after this time, without a result.
        environment: variables added to each job's.

    Returns:
        Names of the jobs that did not get done.
    """
    for folder in ("logs", "done"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    attempts = dict.fromkeys((job.name for job in jobs), 0)
    running: list[Running] = []
    try:
        while True:
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                _note(one, out, time.monotonic() - started)
            for job in jobs:
                if not (out / "done" / job.name).exists() and job.unneeded():
                    _drop(job, running, out, time.monotonic() - started)
            done = _done(jobs, out)
            waiting = [
                job
                for job in jobs
                if job.name not in done
                and attempts[job.name] < ATTEMPTS
                and job.name not in {one.job.name for one in running}
            ]
            ready = [job for job in waiting if done.issuperset(job.needs)]
            if not running and not ready:
                break
            for job in sorted(ready, key=lambda job: (-job.urgency, -job.estimated_seconds)):
                gpu = _free_gpu(job, running, max(1, gpus), places)
                if gpu is not None:
                    attempts[job.name] += 1
                    running.append(_start(job, out, gpu if gpus else None, environment or {}))
                    print(f"{time.monotonic() - started:6.0f} s  gpu {gpu}  starts {job.name}", flush=True)
            if max_seconds is not None and time.monotonic() - started > max_seconds:
                break
            time.sleep(POLL_SECONDS)
    finally:
        end([one.process for one in running])
    done = _done(jobs, out)
    return [job.name for job in jobs if job.name not in done]


def _done(jobs: Sequence[Job], out: Path) -> set[str]:
    return {job.name for job in jobs if (out / "done" / job.name).exists()}


def _free_gpu(job: Job, running: Sequence[Running], gpus: int, places: int) -> int | None:
    """The GPU with the fewest jobs that still takes this one."""
    loads = []
    for gpu in range(gpus):
        there = [one.job for one in running if one.gpu == gpu]
        if any(other.alone for other in there) or (job.alone and there) or len(there) >= places:
            continue
        loads.append((len(there), gpu))
    return min(loads)[1] if loads else None


def _start(job: Job, out: Path, gpu: int | None, environment: dict[str, str]) -> Running:
    line = list(job.command())
    variables = dict(environment)
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    with (out / "logs" / f"{job.name}.log").open("ab") as log:
        process = start(line, log, variables)
    return Running(job=job, gpu=gpu or 0, process=process, started=time.monotonic(), line=line)


def _drop(job: Job, running: list[Running], out: Path, now_seconds: float) -> None:
    """Ends a job that nobody needs any more."""
    for one in [one for one in running if one.job is job]:
        end([one.process])
        running.remove(one)
        _write_down(one, out)
        print(f"{now_seconds:6.0f} s  gpu {one.gpu}  ends unneeded {job.name}", flush=True)
    (out / "done" / job.name).touch()


def _note(one: Running, out: Path, now_seconds: float) -> None:
    code = one.process.returncode
    if code == 0:
        (out / "done" / one.job.name).touch()
    seconds = _write_down(one, out)
    word = "ended" if code == 0 else "FAILED"
    print(f"{now_seconds:6.0f} s  gpu {one.gpu}  {word}  {one.job.name}: {seconds} s", flush=True)
    if code:
        tail = (out / "logs" / f"{one.job.name}.log").read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
        print("\n".join("          " + line for line in tail), flush=True)


def _write_down(one: Running, out: Path) -> float:
    """Adds a process that ended to the ledger, also one whose result others no longer needed; returns its seconds."""
    seconds = round(time.monotonic() - one.started, 1)
    entry = {
        "job": one.job.name,
        "gpu": one.gpu,
        "seconds": seconds,
        "exit_code": one.process.returncode,
        "command": shlex.join(one.line),
    }
    with (out / "jobs.jsonl").open("a", encoding="utf-8") as ledger:
        ledger.write(json.dumps(entry) + "\n")
    return seconds
