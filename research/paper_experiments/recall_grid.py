"""Trains MQRAR models of many sizes and learning rates at once, each in a separate process.

    python -m research.paper_experiments.recall_grid --out build/recall --gpus 4 \
        --stickbreaking 128 192 --rope 32 64 128 192 --steps 12000

A cell of the table (an attention and a number of pairs) ends as soon as one of its learning rates solves it: the other
runs of the cell are stopped or not begun. The first rate of all cells goes first, then the second, and within a rate
stick-breaking before RoPE and few pairs before many. `--max-seconds` bounds everything; a run still going then writes
what it has reached, and its table says that its steps were not all taken. Started again, the runs without a table are
done.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from research.paper_experiments.job_queue import Job, run_queue
from research.paper_experiments.mqrar import LEARNING_RATES
from sbeval.tasks.recall.sequences import PAIRS

SECONDS_TO_END = 10.0
"""A run needs them after its time is up: the last test and the file."""
CPU_THREADS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"}


def runs_of(folder: Path, attention: str, pairs: int) -> list[Path]:
    """The tables of a cell, one for each learning rate that ended."""
    return sorted(folder.glob(f"{attention}_{pairs}_*.json"))


def solved(folder: Path, attention: str, pairs: int) -> bool:
    """Whether a learning rate has solved the cell."""
    tables = (json.loads(file.read_text(encoding="utf-8")) for file in runs_of(folder, attention, pairs))
    return any(run["solved"] for table in tables for run in table)


def jobs_of(
    folder: Path,
    cells: Sequence[tuple[str, int]],
    rates: Sequence[float],
    more: Sequence[str] = (),
    *,
    max_seconds: float | None = None,
) -> list[Job]:
    """Returns one job for each run.

    Args:
        folder: gets `<attention>_<pairs>_<rate>.json`.
        cells: (attention, pairs), the most wanted first.
        rates: learning rates, the most promising first.
        more: options of every run (`research.paper_experiments.mqrar`).
        max_seconds: from now, within which all runs end by themselves.
    """
    end = None if max_seconds is None else time.monotonic() + max_seconds - SECONDS_TO_END

    def command(attention: str, pairs: int, rate: float) -> list[str]:
        line = [sys.executable, "-u", "-m", "research.paper_experiments.mqrar", "--attention", attention]
        line += ["--pairs", str(pairs), "--learning-rates", repr(rate), *more]
        line += ["--out", str(folder / f"{attention}_{pairs}_{rate:.1e}.json")]
        return line if end is None else [*line, "--max-seconds", f"{max(1.0, end - time.monotonic()):.0f}"]

    return [
        Job(
            name=f"mqrar_{attention}_{pairs}_{rate:.1e}",
            command=functools.partial(command, attention, pairs, rate),
            urgency=-(place * len(cells) + index),
            unneeded=functools.partial(solved, folder, attention, pairs),
        )
        for place, rate in enumerate(rates)
        for index, (attention, pairs) in enumerate(cells)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the grid; options it does not know go to every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stickbreaking", type=int, nargs="*", default=list(PAIRS), metavar="PAIRS")
    parser.add_argument("--rope", type=int, nargs="*", default=list(PAIRS), metavar="PAIRS")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=list(LEARNING_RATES))
    parser.add_argument("--gpus", type=int, default=1, help="0 runs on the CPU")
    parser.add_argument("--places", type=int, default=4, help="runs at a time on each GPU")
    parser.add_argument("--max-seconds", type=float, default=None)
    options, more = parser.parse_known_args(arguments)
    cells = [(kind, pairs) for kind in ("stickbreaking", "rope") for pairs in getattr(options, kind)]
    folder = options.out / "mqrar"
    folder.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(folder, cells, options.learning_rates, more, max_seconds=options.max_seconds)
    left = run_queue(
        jobs,
        options.out,
        gpus=options.gpus,
        places=options.places,
        max_seconds=options.max_seconds,
        environment=CPU_THREADS,
    )
    print(f"{len(jobs) - len(left)} of {len(jobs)} runs done" + (f"; not done: {', '.join(left)}" if left else ""))
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
