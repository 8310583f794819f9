r"""Trains position schemes with several seeds and evaluates each model on NLL, needles, recall and riffled documents.

    python -m research.training_text.tokenised demo_data.tar --out build/demo_data --length 1024 --recall-windows 32768
    python -m research.paper_experiments.held_out_text stdlib_311.jsonl.gz
    python -m research.paper_experiments.scheme_grid --data build/demo_data --held-out stdlib_311.jsonl.gz \
        --out build/grid --schemes ssmax entmax asentmax nape nape_asentmax --max-seconds 480 --archive grid.tar.xz
    python -m research.paper_experiments.scheme_tables grid.tar.xz

One command trains and evaluates. The recipe is that of `extrapolation`: the same tokens in the same order, three
learning rates on the first part of the data, and the best of them for all seeds. Schemes whose rate the archive of
docs/results/extrapolation records are not searched again. A model is evaluated as soon as it is trained, seed 0 of all
schemes first. Killed, or ended by `--max-seconds`, the same command goes on; the archive holds the results so far.
`--stages evaluate` only evaluates the checkpoints in the folder. `--shrink 16` runs on a CPU in minutes. The held-out
text has the name that it has in the archive, so that its documents have the same names there.
"""

import argparse
import functools
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research.paper_experiments.extrapolation import LENGTH_TOKENS, SCHEMES, Plan, checkpoint, search_name, training
from research.paper_experiments.job_queue import Job, run_queue

KNOWN_RATES = Path("docs/results/extrapolation/results.tar.xz")
RATES = (1.5e-3, 3e-3, 6e-3)
SEARCH_TOKENS, TOKENS = 19_660_800, 131_072_000
FIXED, STREAM, RIFFLED = "sb_stdlib_fixed_target", "sb_stdlib_stream", "sb_stdlib_riffled"
RECALL = ("sb_niah_single_1", "sb_niah_single_1_forced", "sb_mqrar", "sb_flipflop", "sb_copy")
GROUPS = {"fixed": (FIXED,), "stream": (STREAM,), "riffled": (RIFFLED,), "recall": RECALL}
MQRAR_PAIRS = (16, 64)
# adasplash tunes 30 launch configurations of each kernel for each length otherwise, which takes longer than a run
ENVIRONMENT = {"ADASPLASH_TEST_FAST_AUTOTUNE": "1"}
THREADS = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "true"}


def plan_of(options: argparse.Namespace) -> Plan:
    """Returns the settings that training takes from `extrapolation`."""
    return Plan(
        data=options.data,
        packed=None,
        held_out=options.held_out,
        out=options.out,
        essays=None,
        schemes=tuple(options.schemes),
        learning_rates=tuple(options.learning_rates),
        tokens=options.tokens,
        search_tokens=options.search_tokens,
        validation_tokens=524_288 + 1 if options.shrink == 1 else 4096,
        seeds=options.seeds,
        extension_tokens=0,
        extension_rate=0.0,
        stream_blocks=options.stream_blocks,
        target_blocks=options.target_blocks,
        needle_samples=options.samples,
        recall_pairs=(),
        recall_steps=0,
        shrink=options.shrink,
        device="cuda" if options.gpus else "cpu",
    )


def known_rates(archive: Path) -> dict[str, float]:
    """Returns the learning rates of the models in an archive by scheme; an empty dictionary without the archive."""
    if not archive.is_file():
        return {}
    rates = {}
    with tarfile.open(archive) as file:
        for member in file:
            name = Path(member.name)
            if name.parent.name == "records" and name.stem.startswith("scheme_"):
                record = json.load(file.extractfile(member))  # type: ignore[arg-type]
                if "learning_rate" in (found := record.get("recipe", {}).get("optimization", {})):
                    rates[name.stem.removeprefix("scheme_")] = float(found["learning_rate"])
    return rates


def model_name(scheme: str, seed: int) -> str:
    """Returns the name of a run, as in `extrapolation`."""
    return f"scheme_{scheme}" if seed == 0 else f"scheme_{scheme}_seed{seed}"


def evaluation(plan: Plan, name: str, group: str) -> list[str]:
    """Returns the command of one evaluation; its settings are those of `extrapolation` where that has the task."""
    short = [length for length in plan.lengths(16) if length >= plan.length]
    samples = plan.needle_samples
    from_text: dict[str, Any] = {"data_path": str(plan.held_out)}
    settings: dict[str, tuple[int, dict[str, Any]]] = {
        "fixed": (plan.target_blocks, from_text | {"context_lengths": plan.lengths(16)}),
        "stream": (plan.stream_blocks, from_text | {"context_lengths": plan.lengths(64)}),
        # a turn of four documents takes 256 tokens
        "riffled": (40, from_text | {"context_lengths": short if plan.shrink == 1 else [LENGTH_TOKENS // 2]}),
        "recall": (
            samples,
            {
                "context_lengths": short if plan.shrink == 1 else [LENGTH_TOKENS],
                "num_samples": samples,
                **{task: {"depths": 5} for task in RECALL[:2]},
                "sb_mqrar": {"vocabulary": 4096, "pairs": list(MQRAR_PAIRS)},
            },
        ),
    }
    limit, metadata = settings[group]
    dtype = "float32" if plan.device == "cpu" else "bfloat16"
    longest = 64 * LENGTH_TOKENS
    arguments = f"pretrained={checkpoint(plan, name)},dtype={dtype},max_length={longest}"
    command = [sys.executable, "-P", "-m", "sbeval", "run", "--tasks", ",".join(GROUPS[group])]
    command += ["--device", plan.device, "--model_args", arguments, "--limit", str(limit), "--batch_size", "8"]
    command += ["--metadata", json.dumps(metadata), "--output_path", str(plan.out / "results" / name)]
    return command


def chosen_rate(plan: Plan, scheme: str, rates: dict[str, float]) -> float:
    """Returns the known learning rate of a scheme, or the one with the lowest validation loss of the search."""
    if scheme in rates:
        return rates[scheme]
    losses = {}
    for rate in plan.learning_rates:
        record = checkpoint(plan, search_name(scheme, rate)) / "training_record.json"
        losses[rate] = json.loads(record.read_text(encoding="utf-8"))["validation"]["nll"]
    return min(losses, key=lambda rate: losses[rate])


def jobs_of(plan: Plan, rates: dict[str, float], stages: Sequence[str], groups: Sequence[str]) -> list[Job]:
    """Returns all jobs; those of seed 0 come first, and an evaluation before the training of further seeds."""

    def train(scheme: str, name: str, seed: int) -> list[str]:
        return training(plan, scheme, name, chosen_rate(plan, scheme, rates), plan.tokens, seed)

    jobs = []
    for scheme in plan.schemes:
        searches: tuple[str, ...] = ()
        if "train" in stages and scheme not in rates:
            searches = tuple(search_name(scheme, rate) for rate in plan.learning_rates)
            for rate, search in zip(plan.learning_rates, searches, strict=True):
                command = functools.partial(training, plan, scheme, search, rate, plan.search_tokens, 0)
                jobs.append(Job(name=search, command=command, urgency=100, estimated_seconds=plan.search_tokens))
        for seed in range(plan.seeds):
            name = model_name(scheme, seed)
            is_there = (checkpoint(plan, name) / "config.json").is_file()
            if "train" in stages:
                command = functools.partial(train, scheme, name, seed)
                urgency = 50 - 10 * seed
                jobs.append(Job(name=name, command=command, needs=searches, urgency=urgency, estimated_seconds=2e8))
            elif not is_there:
                continue
            for place, group in enumerate(groups if "evaluate" in stages else ()):
                jobs.append(
                    Job(
                        name=f"{name}-{group}",
                        command=functools.partial(evaluation, plan, name, group),
                        needs=(name,) if "train" in stages else (),
                        urgency=55 - 10 * seed - place,
                    )
                )
    return jobs


def archive_results(out: Path, archive: Path) -> None:
    """Packs results, training records, the ledger of jobs and facts about the machine."""
    with tarfile.open(archive, "w:xz") as file:
        for name in ("results", "jobs.jsonl", "machine.json", "plan.json"):
            if (out / name).exists():
                file.add(out / name, name)
        for record in sorted(out.glob("runs/*/*/training_record.json")):
            file.add(record, f"records/{record.parent.name}.json")
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="token arrays (`research.training_text.tokenised`)")
    parser.add_argument("--held-out", type=Path, required=True, help="text to evaluate on (`held_out_text`)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--seeds", type=int, default=3, help="of every scheme named")
    parser.add_argument("--stages", nargs="+", choices=("train", "evaluate"), default=["train", "evaluate"])
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS), help="of evaluations")
    parser.add_argument("--rates", type=Path, default=KNOWN_RATES, help="archive with records of learning rates")
    parser.add_argument("--gpus", type=int, default=1, help="0 runs on the CPU")
    parser.add_argument("--places", type=int, default=5, help="jobs at a time on each GPU")
    parser.add_argument("--max-seconds", type=float, default=None, help="end then; the same command goes on")
    parser.add_argument("--archive", type=Path, default=None, help="pack the results here, also after --max-seconds")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a run")
    parser.add_argument("--search-tokens", type=int, default=SEARCH_TOKENS, help="of a run of the learning-rate search")
    parser.add_argument("--stream-blocks", type=int, default=8)
    parser.add_argument("--target-blocks", type=int, default=120)
    parser.add_argument("--samples", type=int, default=25, help="of needles and recall tasks at each length")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths and batches, with a tiny model")
    parser.add_argument("--commit", default=None, help="of the code, where git cannot be asked")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    plan = plan_of(options)
    plan.out.mkdir(parents=True, exist_ok=True)
    (plan.out / "plan.json").write_text(json.dumps(vars(options), default=str, indent=1), encoding="utf-8")
    jobs = jobs_of(plan, known_rates(options.rates), options.stages, options.groups)
    left = run_queue(
        jobs,
        plan.out,
        gpus=options.gpus,
        places=options.places,
        max_seconds=options.max_seconds,
        environment=THREADS | ENVIRONMENT,
    )
    machine = {"gpus": options.gpus, "seconds": round(time.monotonic() - started, 1), "gpu": _gpu(options.gpus)}
    machine |= {"commit": options.commit or _commit()}
    with (plan.out / "machine.json").open("a", encoding="utf-8") as file:
        file.write(json.dumps(machine) + "\n")
    if options.archive is not None:
        archive_results(plan.out, options.archive)
    print(f"{len(jobs) - len(left)} of {len(jobs)} jobs done" + (f"; not done: {', '.join(left)}" if left else ""))
    sys.exit(1 if left else 0)


def _gpu(gpus: int) -> str | None:
    if not gpus:
        return None
    import torch

    return torch.cuda.get_device_name()


def _commit() -> str | None:
    answer = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


if __name__ == "__main__":
    main()
