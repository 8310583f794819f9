"""Accuracy of the times that `sbeval inspect --measure` estimates, for three runs of shipped checkpoints.

    python benchmarks/estimates/inspection.py [--folder FOLDER]

A run is timed from its start to its end; its estimate is what imports and requests took, loading and the time in the
model together.
"""

import argparse
import importlib.resources
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

SHIPPED = Path(str(importlib.resources.files("sbeval.demo"))) / "checkpoints"


class Run(NamedTuple):
    """An evaluation."""

    checkpoint: str
    task: str
    lengths: tuple[int, ...]
    limit: int


RUNS = (
    Run("rope", "sb_stdlib_stream", (256, 1024, 4096), 8),
    Run("stickbreaking", "sb_stdlib_fixed_target", (512, 2048), 12),
    Run("rope", "sb_niah_single_1", (1024,), 8),
)


def options(run: Run) -> list[str]:
    """The options that both commands take."""
    metadata = {"context_lengths": list(run.lengths), "num_samples": run.limit}
    return ["--tasks", run.task, "--metadata", json.dumps(metadata), "--limit", str(run.limit)]


def sbeval(*arguments: str) -> str:
    """Runs `sbeval` and returns its output."""
    done = subprocess.run([sys.executable, "-m", "sbeval", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done.stdout


def main() -> None:
    """Prints one row a run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=None, help="keep results here")
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp())
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"{place}, torch {torch.__version__}\n")
    print("| run | tokens | before the model s | in the model s | estimate s | took s | estimate / took | load |")
    print("|---|---|---|---|---|---|---|---|")
    for number, run in enumerate(RUNS):
        answer = json.loads(sbeval("inspect", str(SHIPPED / run.checkpoint), *options(run), "--measure", "--json"))
        started = time.perf_counter()
        model, output = f"pretrained={SHIPPED / run.checkpoint}", str(folder / f"{number}")
        sbeval("run", "--model_args", model, *options(run), "--output_path", output)
        took = time.perf_counter() - started
        estimate = answer["estimate"]
        before = estimate["preparing_seconds"] + estimate["loading_seconds"]
        whole = before + estimate["seconds"]
        tokens = sum(task["tokens"] for task in answer["tasks"])
        print(
            f"| {run.checkpoint}, {run.task}, {', '.join(map(str, run.lengths))} | {tokens} | {before:.1f} "
            f"| {estimate['seconds']:.1f} | {whole:.1f} | {took:.1f} | {whole / took:.2f} | {os.getloadavg()[0]:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
