"""How long does `sbeval report` take for 50 runs, and how much memory for a samples file of 1 GB?

Writes 50 runs as lm-eval would leave them, samples with their prompts: 12 position schemes with three seeds on three
protocols, a context extension, ten models on RULER, MQRAR and ordinary tasks, three of them on attention spans. Then
times the whole command, figures included. Run: `python benchmarks/report.py [--repeats N]`, or `--memory` for the
samples file, or `--files 500 2000 10000` for so many results files: of as many models, of as many tasks of one model,
or of one run again and again.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests" / "reports"))

import experiment_files as experiments
import result_files as results

COMMAND = [sys.executable, "-m", "sbeval", "report"]
SHAPES = ("models", "tasks", "again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="measure peak memory with a samples file of 1 GB instead")
    parser.add_argument("--files", type=int, nargs="*", default=[], help="measure reports of so many results files")
    parser.add_argument("--of", nargs="*", choices=SHAPES, default=SHAPES, help="what differs between these files")
    parser.add_argument("--keep", type=Path, default=None, help="folder to keep results and report in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        if options.memory:
            measure_memory(folder)
        elif options.files:
            measure_files(folder, options.files, options.of)
        else:
            measure_time(folder, options.repeats)


def measure_time(folder: Path, repeats: int) -> None:
    if not (folder / "results").exists():
        write_runs(folder / "results")
    files = [path for path in (folder / "results").rglob("*") if path.is_file()]
    runs = sum(path.name.startswith("results_") for path in files)
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    print(f"{runs} runs, {len(files)} files, {megabytes:.0f} MB, {os.cpu_count()} cores", flush=True)
    took = []
    for _ in range(repeats):
        start, before = time.perf_counter(), cpu_seconds()
        command = [*COMMAND, folder / "results", "-o", folder / "report"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        took.append(time.perf_counter() - start)
        busy, load = cpu_seconds() - before, os.getloadavg()[0]
        print(f"sbeval report: {took[-1]:.2f} s, {busy:.2f} s of CPU; the machine's load is {load:.1f}", flush=True)
    figures = len(list((folder / "report" / "figures").iterdir()))
    print(f"median of {repeats}: {statistics.median(took):.2f} s, {figures} figure files")


def cpu_seconds() -> float:
    """Processor time of all finished child processes and theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_runs(folder: Path) -> None:
    """Writes 50 runs; samples are as large as those of runs to 64K (stream) and 16K (RULER) are."""
    experiments.write_schemes(folder / "schemes", seeds=3, arguments_bytes=25_000)
    experiments.write_extensions(folder / "extensions")
    for index in range(10):
        reach = 2048 << (index % 4)
        tasks = [
            results.ruler_task(name, reach, seed=place, lengths=experiments.LENGTHS[2:7], depths=10, repeats=2)
            for place, name in enumerate(results.RULER_TASKS)
        ]
        tasks += [results.ordinary_task(name, "acc", 0.3 + 0.02 * index) for name in ("hellaswag", "piqa", "arc_easy")]
        tasks += [experiments.mqrar_task(32 * (1 + index % 6))]
        tasks += [experiments.span_task("stickbreaking")] if index < 3 else []
        scheme = experiments.SCHEMES[index]
        results.write_run(folder / f"tasks-{scheme}", experiments.scheme_model(scheme), tasks, arguments_bytes=75_000)


def measure_memory(folder: Path) -> None:
    """Prints the report's peak resident memory without and with a samples file of 1 GB."""
    for megabytes in (1, 1000):
        place = folder / str(megabytes)
        task = results.perplexity_task("stream", results.CURVES["rope"])
        results.write_run(place, results.model_record("rope"), [task])
        samples = next(place.glob("samples_*.jsonl"))
        line = json.dumps({"doc_id": 9, "doc": {"text": "x" * 100_000}, "filter": "none"}) + "\n"
        with samples.open("a", encoding="utf-8") as file:
            file.writelines(line for _ in range(megabytes * 10))
        start = time.perf_counter()
        subprocess.run([*COMMAND, place, "-o", folder / "report"], check=True, stdout=subprocess.DEVNULL)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        took, size = time.perf_counter() - start, samples.stat().st_size / 1e6
        print(f"{size:.0f} MB of samples: {took:.2f} s, peak {peak:.0f} MiB")


def measure_files(folder: Path, counts: Sequence[int], shapes: Sequence[str]) -> None:
    """Prints time and peak resident memory of a report of many results files, each with samples of two tasks."""
    for shape, count in itertools.product(shapes, counts):
        place = folder / f"{shape}{count}"
        for index in range(0 if place.exists() else count):
            write_file(place / str(index), shape, index)
        start = time.perf_counter()
        with subprocess.Popen([*COMMAND, place, "-o", folder / "report"], stdout=subprocess.DEVNULL) as process:
            _, code, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(code)
        took, busy = time.perf_counter() - start, used.ru_utime + used.ru_stime
        words = (
            f"{took:.0f} s, {busy:.0f} s of CPU, peak {used.ru_maxrss / 1024:.0f} MiB, exit code {process.returncode}"
        )
        print(f"{count} files, {shape}: {words}", flush=True)


def write_file(folder: Path, shape: str, index: int) -> None:
    """Writes one run of a text and a task of lm-eval: of another model, of other tasks, or the same at another time."""
    facts = {"name": f"step-{index}", "checkpoint_sha256": f"{index:064x}"} if shape == "models" else {}
    corpus = f"text{index}" if shape == "tasks" else "stdlib"
    curve = [value + index % 100 / 1000 for value in results.CURVES["rope"][:4]]
    tasks = [results.perplexity_task("stream", curve, lengths=results.LENGTHS[:4], corpus=corpus, documents=24)]
    tasks += [results.ordinary_task(f"task{index}" if shape == "tasks" else "piqa", "acc", 0.5, samples=20)]
    date = f"2026-11-20T10-00-00.{index:06d}"
    results.write_run(folder, results.model_record("rope", **facts), tasks, date=date, seconds=1_795_000_000.0 + index)


if __name__ == "__main__":
    main()
