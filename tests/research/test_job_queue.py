import json
import signal
import subprocess
import sys
import time

from research.paper_experiments.job_queue import Job, run_queue

WRITE_TIME = "import pathlib, sys, time; p = pathlib.Path(sys.argv[1]); t = time.monotonic()"


def job(folder, name: str, code: str = "", **options) -> Job:
    """A job that notes when it ran, in a file of its name."""
    line = f"{WRITE_TIME}; {code or 'pass'}; p.write_text(f'{{t}} {{time.monotonic()}}')"
    return Job(name=name, command=lambda: [sys.executable, "-S", "-c", line, str(folder / name)], **options)


def ran(folder, name: str) -> tuple[float, float]:
    first, last = (folder / name).read_text().split()
    return float(first), float(last)


def ledger(out) -> list[str]:
    return [json.loads(line)["job"] for line in (out / "jobs.jsonl").read_text().splitlines()]


def test_urgent_jobs_go_first_then_long_ones_and_needs_are_waited_for(tmp_path):
    jobs = [
        job(tmp_path, "needs_short", needs=("short",), urgency=9),
        job(tmp_path, "short", estimated_seconds=1),
        job(tmp_path, "long", estimated_seconds=5),
        job(tmp_path, "urgent", urgency=1),
    ]
    ending = signal.getsignal(signal.SIGTERM)
    assert run_queue(jobs, tmp_path / "out", gpus=0, places=1) == []
    assert ledger(tmp_path / "out") == ["urgent", "long", "short", "needs_short"]
    assert signal.getsignal(signal.SIGTERM) is ending


def test_a_command_is_worked_out_when_its_needs_are_done(tmp_path):
    def command() -> list[str]:
        return [sys.executable, "-S", "-c", f"assert {(tmp_path / 'first').read_text().split()[0]} > 0"]

    jobs = [Job(name="second", command=command, needs=("first",)), job(tmp_path, "first")]
    assert run_queue(jobs, tmp_path / "out", gpus=0, places=2) == []


def test_a_failed_job_is_tried_again_and_what_needs_it_is_left_and_named(tmp_path):
    jobs = [job(tmp_path, "bad", "raise SystemExit(3)"), job(tmp_path, "after", needs=("bad",)), job(tmp_path, "good")]
    assert run_queue(jobs, tmp_path / "out", gpus=0, places=2) == ["bad", "after"]
    assert sorted(ledger(tmp_path / "out")) == ["bad", "bad", "good"]
    mended = [job(tmp_path, "bad"), *jobs[1:]]
    assert run_queue(mended, tmp_path / "out", gpus=0, places=2) == []
    assert sorted(ledger(tmp_path / "out")) == ["after", "bad", "bad", "bad", "good"]


def test_places_on_each_gpu_and_a_job_alone_on_one(tmp_path):
    show = "import os; (p.parent / (p.name + '_gpu')).write_text(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(0.3)"
    names = ["alone", *(f"shared{index}" for index in range(4))]
    jobs = [job(tmp_path, name, show, alone=name == "alone", urgency=name == "alone") for name in names]
    assert run_queue(jobs, tmp_path / "out", gpus=2, places=2) == []
    gpu = {name: (tmp_path / f"{name}_gpu").read_text() for name in names}
    assert set(gpu.values()) == {"0", "1"}
    first, last = ran(tmp_path, "alone")
    for name in names[1:]:
        begin, end = ran(tmp_path, name)
        assert gpu[name] != gpu["alone"] or begin > last or end < first


def test_a_queue_that_is_ended_ends_its_jobs_and_goes_on_where_it_was(tmp_path):
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(tmp_path)!r})
from research.paper_experiments.job_queue import Job, run_queue
out = Path({str(tmp_path / "out")!r})
sleeper = lambda: [sys.executable, "-S", "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"]
quick = Job(name="quick", command=lambda: [sys.executable, "-S", "-c", "pass"], urgency=1)
run_queue([quick, Job(name="slow", command=sleeper, needs=("quick",))], out, gpus=0, places=1)
"""
    queue = subprocess.Popen([sys.executable, "-c", code])
    log = tmp_path / "out" / "logs" / "slow.log"
    waited_until = time.monotonic() + 60
    while not (log.is_file() and log.read_text()) and time.monotonic() < waited_until:
        time.sleep(0.05)
    process = int(log.read_text())
    queue.send_signal(signal.SIGTERM)
    queue.wait(timeout=30)
    assert subprocess.run(["ps", "-p", str(process)], capture_output=True).returncode != 0
    jobs = [job(tmp_path, "quick"), job(tmp_path, "slow", needs=("quick",))]
    assert run_queue(jobs, tmp_path / "out", gpus=0, places=1) == []
    assert not (tmp_path / "quick").exists()
    assert (tmp_path / "slow").exists()


def test_a_job_nobody_needs_any_more_is_ended_or_not_begun_and_counts_as_done(tmp_path):
    def unneeded() -> bool:
        return (tmp_path / "first").exists()

    jobs = [
        job(tmp_path, "first", urgency=1),
        job(tmp_path, "under_way", "time.sleep(60)", urgency=1, unneeded=unneeded),
        job(tmp_path, "waiting", unneeded=unneeded),
        job(tmp_path, "after", needs=("under_way", "waiting")),
    ]
    assert run_queue(jobs, tmp_path / "out", gpus=0, places=2) == []
    assert (tmp_path / "after").exists()
    assert not (tmp_path / "under_way").exists()
    assert not (tmp_path / "waiting").exists()
    assert ledger(tmp_path / "out") == ["first", "under_way", "after"]


def test_gpus_are_those_the_queue_itself_may_use(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    show = "import os; (p.parent / (p.name + '_gpu')).write_text(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(0.3)"
    assert run_queue([job(tmp_path, name, show) for name in "ab"], tmp_path / "out", gpus=2, places=1) == []
    assert {(tmp_path / f"{name}_gpu").read_text() for name in "ab"} == {"5", "7"}
