"""How good the times of `sbeval inspect` are: three runs of shipped checkpoints, each estimated in both ways before.

    python benchmarks/estimates/inspection.py [--folder FOLDER]

`--measured` takes the tokens a second of a shorter run of the same checkpoint, at other lengths. A run is timed from
its start to its end; its estimate is what imports and requests took, loading and the time in the model together.
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
from typing import Any, NamedTuple

import torch

SHIPPED = Path(str(importlib.resources.files("sbeval.demo"))) / "checkpoints"


class Run(NamedTuple):
    """An evaluation, and the shorter one before it whose throughput is taken."""

    checkpoint: str
    task: str
    lengths: tuple[int, ...]
    limit: int
    before_task: str
    before_lengths: tuple[int, ...]


RUNS = (
    Run("rope", "sb_stdlib_stream", (256, 1024, 4096), 8, "sb_stdlib_stream", (1024,)),
    Run("stickbreaking", "sb_stdlib_fixed_target", (512, 2048), 12, "sb_stdlib_stream", (1024,)),
    Run("rope", "sb_niah_single_1", (1024,), 8, "sb_niah_single_1", (512,)),
)


def options(checkpoint: str, task: str, lengths: tuple[int, ...], limit: int) -> list[str]:
    """The options that both commands take."""
    metadata = {"context_lengths": list(lengths), "num_samples": limit}
    return ["--tasks", task, "--metadata", json.dumps(metadata), "--limit", str(limit)]


def evaluate(checkpoint: str, options: list[str], output: Path) -> tuple[float, Path]:
    """Runs an evaluation and returns its seconds and its results file."""
    started = time.perf_counter()
    run("run", "--model_args", f"pretrained={SHIPPED / checkpoint}", *options, "--output_path", str(output))
    return time.perf_counter() - started, next(output.rglob("results*.json"))


def estimate(checkpoint: str, options: list[str], *way: str) -> dict[str, Any]:
    """Asks for an estimate."""
    found: dict[str, Any] = json.loads(run("inspect", str(SHIPPED / checkpoint), *options, *way, "--json"))
    return found


def run(*arguments: str) -> str:
    """Runs `sbeval` and returns what it printed."""
    done = subprocess.run([sys.executable, "-m", "sbeval", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done.stdout


def main() -> None:
    """Prints one row a run and way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=None, help="keep results here")
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp())
    place = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    print(f"{place}, torch {torch.__version__}\n")
    print("| run | tokens | way | before the model s | in the model s | estimate s | took s | estimate / took | load |")
    print("|---|---|---|---|---|---|---|---|---|")
    for number, one in enumerate(RUNS):
        shorter = options(one.checkpoint, one.before_task, one.before_lengths, 4)
        _, results = evaluate(one.checkpoint, shorter, folder / f"{number}-before")
        asked = options(one.checkpoint, one.task, one.lengths, one.limit)
        found = {
            "--measured": estimate(one.checkpoint, asked, "--measured", str(results)),
            "--measure": estimate(one.checkpoint, asked, "--measure"),
        }
        took, _ = evaluate(one.checkpoint, asked, folder / f"{number}")
        for way, answer in found.items():
            guess = answer["estimate"]
            before = guess["preparing_seconds"] + (guess["loading_seconds"] or 0)
            whole = before + guess["seconds"]
            tokens = sum(task["tokens"] for task in answer["tasks"])
            print(
                f"| {one.checkpoint}, {one.task}, {', '.join(map(str, one.lengths))} | {tokens} | {way} | {before:.1f} "
                f"| {guess['seconds']:.1f} | {whole:.1f} | {took:.1f} | {whole / took:.2f} "
                f"| {os.getloadavg()[0]:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
