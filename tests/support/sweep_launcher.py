"""A test launcher instead of `accelerate launch`: writes lm-eval's files, or fails, as its first argument says.

python sweep_launcher.py BEHAVIOUR -m sbeval run --config RUN.yaml
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

DATE = "2025-01-02T03-04-05.678901"


def main() -> None:
    began = time.time()
    behaviour, config = sys.argv[1], yaml.safe_load(Path(sys.argv[-1]).read_text(encoding="utf-8"))
    count = Path(sys.argv[-1]).parents[2] / "started.txt"
    with count.open("a", encoding="utf-8") as file:
        file.write(f"{sys.argv[-1]}\n")
    if config["model_args"]["pretrained"] == "broken":
        behaviour = "fail"
    if behaviour == "fail":
        print(
            '  File "x.py", line 1\nCUDAError: out of memory on device 0\nsubprocess.CalledProcessError: Command died'
        )
        sys.exit(3)
    if behaviour == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    if behaviour == "meet":
        meet(count, 3)
        behaviour = "slow"
    if behaviour.startswith("slow"):
        time.sleep(float(behaviour.partition(":")[2] or 0.3))
        with count.with_name("spans.jsonl").open("a", encoding="utf-8") as file:
            gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
            file.write(f"{json.dumps([config['model_args']['pretrained'], gpus, began, time.time()])}\n")
    if behaviour == "hang":
        hang(count.with_name("held.lock"))
    dataset = config.get("metadata", {}).get("dataset")
    write_results(Path(config["output_path"]), samples=1 if behaviour == "cut" else 2, dataset=dataset)


def meet(started: Path, runs: int) -> None:
    """Waits until so many runs have started."""
    deadline = time.monotonic() + 300
    while len(started.read_text(encoding="utf-8").splitlines()) < runs and time.monotonic() < deadline:
        time.sleep(0.02)


def hang(lock: Path) -> None:
    """Holds a lock until this process and one that it starts have both ended."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        worker = subprocess.Popen(["sleep", "300"], pass_fds=(file.fileno(),))
        lock.with_name("hanging.txt").touch()
        worker.wait()


def write_results(folder: Path, *, samples: int = 2, dataset: str | None = None) -> None:
    (folder / "model").mkdir(parents=True, exist_ok=True)
    configs = {"t": {"dataset_path": dataset}}
    results = {"results": {"t": {"acc": 1.0}}, "configs": configs, "n-samples": {"t": {"effective": 2}}}
    (folder / "model" / f"results_{DATE}.json").write_text(json.dumps(results), encoding="utf-8")
    lines = [json.dumps({"doc_id": number, "filter": name}) for number in range(samples) for name in ("a", "b")]
    text = "".join(f"{line}\n" for line in lines)
    (folder / "model" / f"samples_t_{DATE}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
