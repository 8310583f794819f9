r"""Trains models of five attention schemes on algorithms at 64 tokens and tests them at up to 65,536.

    python -m research.paper_experiments.algorithm_grid --max-seconds 480 --archive algorithms.tar.xz
    mkdir -p build/found && tar xJf algorithms.tar.xz -C build/found
    sbeval report build/found/results -o report        # exact match by length, a figure for each algorithm
    python -m research.paper_experiments.algorithm_grid --table algorithms.tar.xz

The tasks are those of Vasylenko et al. 2025 (arXiv 2506.16640), with two differences: a length counts all inputs
instead of those of the source, and the loss counts the source's tokens too. Each model learns one algorithm. With
`--mixed` one model of each scheme learns all of them, which takes a sixth of the runs. `--attention` names other
schemes. Killed, or ended by `--max-seconds`, the same command goes on.
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research.interval_studies.archive import table
from research.paper_experiments.algorithm_data import LENGTH_TOKENS
from research.paper_experiments.job_queue import Job, run_queue
from research.paper_experiments.scheme_grid import ENVIRONMENT, THREADS, archive_results
from research.paper_experiments.scheme_tables import lengths_of, mean_and_range, read_models, values
from sbeval.reports.read.fields import length_text
from sbeval.tasks.recall.algorithms import ALGORITHMS

RECIPE = Path(__file__).with_name("algorithm.yaml")
SCHEMES: dict[str, dict[str, str]] = {
    "stickbreaking": {"attention": "stickbreaking"},
    "rope": {"attention": "rope"},
    "alibi": {"attention": "alibi"},
    "nape": {"attention": "nape"},
    "nape_asentmax": {"attention": "nape", "attention_weights": "asentmax"},
    "nape_ssmax": {"attention": "nape", "attention_weights": "ssmax"},
    "nape_entmax": {"attention": "nape", "attention_weights": "entmax15"},
    "rope_asentmax": {"attention": "rope", "attention_weights": "asentmax"},
    "nope": {"attention": "nope"},
}
"""Fields of the model by scheme; the first five are the default."""
MIXED = "mixed"


def data_command(out: Path, data: str, windows: int) -> list[str]:
    """Returns the command that writes the token arrays of one algorithm, or of all."""
    algorithms = list(ALGORITHMS) if data == MIXED else [data]
    command = [sys.executable, "-m", "research.paper_experiments.algorithm_data", str(out / "data" / data)]
    return [*command, "--algorithms", *algorithms, "--windows", str(windows)]


def train_command(out: Path, name: str, data: str, scheme: str, seed: int, options: argparse.Namespace) -> list[str]:
    """Returns the command of one training run."""
    steps = options.steps * (len(ALGORITHMS) if data == MIXED else 1)
    settings: dict[str, Any] = {f"model.{key}": value for key, value in SCHEMES[scheme].items()}
    settings |= {"name": name, "seed": seed, "data.seed": seed}
    settings |= {"optimization.learning_rate": options.learning_rate}
    settings |= {"optimization.batch_tokens": options.batch_sequences * LENGTH_TOKENS}
    settings |= {"optimization.total_tokens": steps * options.batch_sequences * LENGTH_TOKENS}
    settings |= {"optimization.warmup_steps": max(1, min(300, steps // 10))}
    if not options.gpus:
        settings["precision"] = "float32"
    settings |= {f"model.{key}": value for key, value in json.loads(options.model).items()}
    command = [sys.executable, "-P", "-m", "sbeval", "train", str(RECIPE), "--data", str(out / "data" / data)]
    command += ["--out", str(out / "runs" / name)]
    return [*command, *(part for key, value in settings.items() for part in ("--set", f"{key}={value}"))]


def test_command(out: Path, name: str, label: str, tasks: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Returns the command that evaluates one model; results of one scheme lie in one folder."""
    lengths = [LENGTH_TOKENS * 2**power for power in range(options.doublings + 1)]
    device, dtype = ("cuda", "bfloat16") if options.gpus else ("cpu", "float32")
    arguments = f"pretrained={out / 'runs' / name / name},dtype={dtype},max_length={lengths[-1]}"
    metadata = {"context_lengths": lengths, "num_samples": options.samples}
    command = [sys.executable, "-P", "-m", "sbeval", "run", "--tasks", ",".join(f"sb_algorithm_{t}" for t in tasks)]
    command += ["--device", device, "--model_args", arguments, "--batch_size", "8", "--limit", str(options.samples)]
    return [*command, "--metadata", json.dumps(metadata), "--output_path", str(out / "results" / label)]


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Returns all jobs: the arrays, and for each model its training and its test."""
    out = options.out
    jobs = []
    for data in (MIXED,) if options.mixed else options.algorithms:
        arrays = f"data_{data}"
        windows = options.windows * (len(ALGORITHMS) if data == MIXED else 1)
        jobs.append(Job(name=arrays, command=functools.partial(data_command, out, data, windows), urgency=9))
        tasks = list(ALGORITHMS) if data == MIXED else [data]
        for seed in range(options.seeds):
            for scheme in options.attention:
                label = f"scheme_{scheme}" if seed == 0 else f"scheme_{scheme}_seed{seed}"
                name = f"{data}_{label.removeprefix('scheme_')}"
                train = functools.partial(train_command, out, name, data, scheme, seed, options)
                test = functools.partial(test_command, out, name, label, tasks, options)
                jobs.append(Job(name=name, command=train, needs=(arrays,), urgency=6 - 2 * seed))
                jobs.append(Job(name=f"{name}-test", command=test, needs=(name,), urgency=7 - 2 * seed))
    return jobs


def tables(source: Path) -> str:
    """Returns exact match and token match by length, tables for each algorithm: means over seeds, and their range."""
    schemes = read_models([source])
    lines = []
    for algorithm in ALGORITHMS:
        task = f"sb_algorithm_{algorithm}"
        for metric in ("exact_match", "token_match"):
            lengths = lengths_of(schemes, task, metric)
            rows = []
            for scheme in sorted(schemes, key=lambda name: (*SCHEMES, name).index(name)):
                cells = [mean_and_range(values(schemes[scheme], task, metric, length)) for length in lengths]
                if any(cells):
                    rows.append([scheme, *cells])
            if lengths:
                heading = [f"### {algorithm}, {metric}", ""]
                lines += [*heading, *table(["scheme", *map(length_text, lengths)], rows)]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=None, help="print the tables of an archive or folder instead")
    parser.add_argument("--out", type=Path, default=Path("build/algorithms"))
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--attention", nargs="+", choices=list(SCHEMES), default=list(SCHEMES)[:5])
    parser.add_argument("--mixed", action="store_true", help="one model of each scheme learns all algorithms")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3000, help="of an algorithm")
    parser.add_argument("--batch-sequences", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--windows", type=int, default=262_144, help="different sequences of an algorithm")
    parser.add_argument("--samples", type=int, default=50, help="at each length")
    parser.add_argument("--doublings", type=int, default=10, help="of 64 tokens")
    parser.add_argument("--model", default="{}", help="fields of the model to change, as JSON")
    parser.add_argument("--gpus", type=int, default=1, help="0 runs on the CPU")
    parser.add_argument("--places", type=int, default=6, help="jobs at a time on each GPU")
    parser.add_argument("--max-seconds", type=float, default=None, help="end then; the same command goes on")
    parser.add_argument("--archive", type=Path, default=None, help="pack the results here")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(tables(options.table))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "plan.json").write_text(json.dumps(vars(options), default=str, indent=1), encoding="utf-8")
    jobs = jobs_of(options)
    limits = {"gpus": options.gpus, "places": options.places, "max_seconds": options.max_seconds}
    left = run_queue(jobs, options.out, **limits, environment=THREADS | ENVIRONMENT)
    if options.archive is not None:
        archive_results(options.out, options.archive)
    print(f"{len(jobs) - len(left)} of {len(jobs)} jobs done" + (f"; not done: {', '.join(left)}" if left else ""))
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
