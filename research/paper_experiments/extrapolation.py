r"""Trains one small model of every position scheme and evaluates all of them far beyond their training length.

    python -m research.training_text.tokenised PACKED --out build/demo_data
    python -m research.paper_experiments.held_out_text stdlib.jsonl.gz
    python -m research.paper_experiments.extrapolation --data build/demo_data --held-out stdlib.jsonl.gz \
        --out build/extrapolation --gpus 4

Every scheme is trained at three learning rates on the first part of the data, the rate with the lowest loss on the
validation part at the scheme's own training length is chosen, and one run of it sees all tokens. Stick-breaking and
RoPE get further seeds (initial weights and order of the data) at that rate, and are extended to four times their
length, RoPE with `dynamic:4`. Everything is evaluated through `sbeval run` on held-out text, as soon as it exists. The
validation part is the end of the training text, and no test text is looked at for any choice. Killed and started again,
it goes on. `--shrink 16` makes everything small enough for a test on a CPU. `--packed FILE` tokenises first.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research.paper_experiments.job_queue import Job, run_queue
from sbeval.tasks.recall.sequences import PAIRS

RECIPES = Path(__file__).parent / "recipes"
LENGTH_TOKENS = 1024
BATCH_TOKENS = 65536
SCHEMES = {
    "stickbreaking": {},
    "rope": {},
    "stickbreaking_remainder": {},
    "stickbreaking_remainder_norm": {},
    "rope_4x": {"training_length_tokens": 4 * LENGTH_TOKENS},
    "rope_4x_dynamic": {
        "training_length_tokens": 4 * LENGTH_TOKENS,
        "rope_parameters.original_max_position_embeddings": LENGTH_TOKENS,
    },
    "nope": {},
    "alibi": {},
    "fire": {},
    "forgetting": {},
    "rope_window_256": {"sliding_window": 256},
    "rope_window_512": {"sliding_window": 512},
    "rope_window_1024": {"sliding_window": 1024},
    "ssmax": {},
    "entmax": {},
    "asentmax": {},
    "nape": {},
    "nape_asentmax": {},
}
"""The lengths in each scheme's recipe (`recipes/scheme_*`), which `--shrink` divides."""
LENGTH_KEYS = ("training_length_tokens", "sliding_window", "rope_parameters.original_max_position_embeddings")
SEEDED = ("stickbreaking", "rope")
EXTENDED = {"stickbreaking": None, "rope": "dynamic:4"}
SCALED_AT_EVALUATION = ("dynamic:1", "dynamic:4")
PICTURE_PAIRS = 16
EASY_PAIRS = 64
TINY_MODEL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run; every field but the paths is an option of the command line and is written to `plan.json`."""

    data: Path
    packed: Path | None
    held_out: Path
    out: Path
    essays: Path | None
    schemes: tuple[str, ...]
    learning_rates: tuple[float, ...]
    tokens: int
    search_tokens: int
    validation_tokens: int
    seeds: int
    extension_tokens: int
    extension_rate: float
    stream_blocks: int
    target_blocks: int
    needle_samples: int
    recall_pairs: tuple[int, ...]
    recall_steps: int
    shrink: int
    device: str

    @property
    def length(self) -> int:
        """Training length in tokens."""
        return LENGTH_TOKENS // self.shrink

    @property
    def batch_tokens(self) -> int:
        """Tokens of one optimizer step."""
        return BATCH_TOKENS // self.shrink

    def lengths(self, longest_multiple: int) -> list[int]:
        """A quarter of the training length and its doublings up to a multiple of it."""
        lengths = [self.length // 4]
        while lengths[-1] < longest_multiple * self.length:
            lengths.append(2 * lengths[-1])
        return lengths


def training(plan: Plan, scheme: str, name: str, rate: float, tokens: int, seed: int) -> list[str]:
    """The command of one training run."""
    batch = plan.batch_tokens
    steps = tokens // batch
    settings: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "data.seed": seed,
        "data.validation_tokens": plan.validation_tokens,
        "optimization.learning_rate": rate,
        "optimization.total_tokens": steps * batch,
        "optimization.batch_tokens": batch,
        "optimization.warmup_steps": max(1, min(200, steps // 5)),
        "save_every_steps": max(steps, 1),
    }
    if plan.shrink > 1:
        lengths = {"training_length_tokens": LENGTH_TOKENS} | SCHEMES[scheme]
        settings |= {f"model.{key}": value for key, value in TINY_MODEL.items()}
        settings |= {f"model.{key}": value // plan.shrink for key, value in lengths.items() if key in LENGTH_KEYS}
        settings |= {"precision": "float32"}
    command = [sys.executable, "-P", "-m", "sbeval", "train", str(RECIPES / f"scheme_{scheme}.yaml")]
    command += ["--data", str(plan.data), "--out", str(plan.out / "runs" / name)]
    return [*command, *(part for key, value in settings.items() for part in ("--set", f"{key}={value}"))]


def checkpoint(plan: Plan, name: str) -> Path:
    """Where a run leaves its checkpoint."""
    return plan.out / "runs" / name / ("checkpoint" if name.endswith("_extended") else name)


def search_name(scheme: str, rate: float) -> str:
    """Name of one run of the learning-rate search."""
    return f"search_{scheme}_{rate:g}"


def chosen_rate(plan: Plan, scheme: str) -> float:
    """The learning rate with the lowest validation loss."""
    losses = {}
    for rate in plan.learning_rates:
        record = checkpoint(plan, search_name(scheme, rate)) / "training_record.json"
        losses[rate] = json.loads(record.read_text(encoding="utf-8"))["validation"]["nll"]
    return min(losses, key=lambda rate: losses[rate])


def extension(plan: Plan, scheme: str) -> list[str]:
    """The command of a context extension to four times the length, the paper's schedule scaled down."""
    steps = max(1, plan.extension_tokens // plan.batch_tokens)
    command = [sys.executable, "-P", "-m", "sbeval", "extend", str(checkpoint(plan, f"scheme_{scheme}"))]
    command += ["--data", str(plan.data), "--context", str(4 * plan.length), "--documents", "joined", "--seed", "1"]
    command += ["--steps", str(steps), "--batch-tokens", str(plan.batch_tokens)]
    command += ["--micro-batch-tokens", str(plan.batch_tokens), "--learning-rate", str(plan.extension_rate)]
    command += ["--warmup-steps", str(max(1, steps * 150 // 6250)), "--allow-repeat"]
    command += ["--save-every-steps", str(steps), "--out", str(plan.out / "runs" / f"scheme_{scheme}_extended")]
    if EXTENDED[scheme] is not None:
        command += ["--rope-scaling", str(EXTENDED[scheme])]
    if plan.shrink > 1:
        command += ["--precision", "float32"]
    return command


def evaluation(plan: Plan, name: str, task: str, scaling: str | None = None) -> list[str]:
    """The command of one evaluation."""
    metadata: dict[str, Any]
    if task.startswith("sb_stdlib"):
        stream = task == "sb_stdlib_stream"
        limit = plan.stream_blocks if stream else plan.target_blocks
        metadata = {"data_path": str(plan.held_out), "context_lengths": plan.lengths(64 if stream else 16)}
    else:
        limit = plan.needle_samples
        metadata = {"context_lengths": [length for length in plan.lengths(16) if length >= plan.length]}
        metadata |= {"num_samples": plan.needle_samples, "depths": 5}
        if plan.shrink > 1:
            metadata["context_lengths"] = [LENGTH_TOKENS]
        if plan.essays is not None:
            metadata["essays"] = str(plan.essays)
    arguments = {"pretrained": str(checkpoint(plan, name)), "dtype": "float32" if plan.device == "cpu" else "bfloat16"}
    # needles: the adapter's longest input would else be the training length
    arguments |= {"max_length": str(64 * LENGTH_TOKENS)}
    if scaling is not None:
        arguments["rope_scaling"] = scaling
    command = [sys.executable, "-P", "-m", "sbeval", "run", "--tasks", task, "--device", plan.device]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
    command += ["--metadata", json.dumps(metadata), "--limit", str(limit), "--batch_size", "8"]
    label = name if scaling is None else f"{name}_{scaling.replace(':', '')}"
    return [*command, "--output_path", str(plan.out / "results" / label)]


def jobs_of(plan: Plan) -> list[Job]:
    """All jobs; names of evaluations end in the task."""
    jobs: list[Job] = []
    ready: tuple[str, ...] = ()
    if plan.packed is not None:
        command = [sys.executable, "-m", "research.training_text.tokenised", str(plan.packed)]
        command += ["--out", str(plan.data), "--length", str(plan.length)]
        command += ["--recall-windows", str(32768 if plan.shrink == 1 else 512)]
        jobs.append(Job(name="tokenise", command=lambda: command, urgency=9))
        ready = ("tokenise",)

    def add(name: str, needs: Sequence[str], urgency: int, seconds: float, make: Any, *arguments: Any) -> None:
        command = functools.partial(make, plan, *arguments)
        jobs.append(Job(name=name, command=command, needs=tuple(needs), urgency=urgency, estimated_seconds=seconds))

    def evaluate(name: str, needs: str, urgency: int, scaling: str | None = None) -> None:
        label = name if scaling is None else f"{name}_{scaling.replace(':', '')}"
        for task in ("sb_stdlib_stream", "sb_stdlib_fixed_target"):
            add(f"{label}-{task}", (needs,), urgency, 30, evaluation, name, task, scaling)

    def needles(name: str, needs: str, scaling: str | None = None) -> None:
        label = name if scaling is None else f"{name}_{scaling.replace(':', '')}"
        for kind in ("single_1", *(["multikey_1"] if plan.essays is not None else [])):
            for task in (f"sb_niah_{kind}", f"sb_niah_{kind}_forced"):
                add(f"{label}-{task}", (needs,), 1, 30, evaluation, name, task, scaling)

    for scheme in plan.schemes:
        searches = []
        for rate in plan.learning_rates:
            search = search_name(scheme, rate)
            searches.append(search)
            add(search, ready, 6, plan.search_tokens, training, scheme, search, rate, plan.search_tokens, 0)
        for seed in range(plan.seeds if scheme in SEEDED else 1):
            name = f"scheme_{scheme}" if seed == 0 else f"scheme_{scheme}_seed{seed}"
            add(name, (*ready, *searches), 3 if seed else 6, plan.tokens, _chosen_training, scheme, name, seed)
            evaluate(name, name, 4 if seed else 7)
    for scaling in SCALED_AT_EVALUATION if "rope" in plan.schemes else ():
        evaluate("scheme_rope", "scheme_rope", 7, scaling)
    for scheme in [scheme for scheme in EXTENDED if scheme in plan.schemes]:
        name = f"scheme_{scheme}_extended"
        add(name, (f"scheme_{scheme}",), 6, plan.extension_tokens, extension, scheme)
        evaluate(name, name, 7)
        needles(f"scheme_{scheme}", f"scheme_{scheme}")
        needles(name, name)
    if "rope" in plan.schemes:
        needles("scheme_rope", "scheme_rope", "dynamic:4")
    return jobs


def _chosen_training(plan: Plan, scheme: str, name: str, seed: int) -> list[str]:
    return training(plan, scheme, name, chosen_rate(plan, scheme), plan.tokens, seed)


def recall(plan: Plan, attention: str, pairs: int) -> list[str]:
    """The command of one MQRAR model; 16 pairs are there for the picture."""
    command = [sys.executable, "-m", "research.paper_experiments.mqrar", "--attention", attention]
    command += ["--pairs", str(pairs), "--steps", str(plan.recall_steps)]
    command += ["--out", str(plan.out / "mqrar" / f"{attention}_{pairs}.json")]
    if pairs == PICTURE_PAIRS:
        command += ["--picture"]
    if plan.shrink > 1:
        command += ["--length-tokens", "64", "--vocabulary", "128", "--hidden-size", "32", "--test-sequences", "8"]
        command += ["--batch-sequences", "4", "--learning-rates", "1e-3"]
    return command


def recall_jobs(plan: Plan) -> list[Job]:
    """The short ones need nothing and fill the time of tokenising; the long ones come when the rest is under way."""
    jobs = []
    for pairs in plan.recall_pairs:
        for attention in SEEDED:
            jobs.append(
                Job(
                    name=f"mqrar_{attention}_{pairs}",
                    command=functools.partial(recall, plan, attention, pairs),
                    needs=("tokenise",) if pairs > EASY_PAIRS and plan.packed is not None else (),
                    urgency=2,
                    estimated_seconds=pairs,
                )
            )
    return jobs


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="token arrays (made here with --packed)")
    parser.add_argument("--packed", type=Path, default=None, help="training text to tokenise first")
    parser.add_argument("--held-out", type=Path, required=True, help="text to evaluate on (`held_out_text`)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--essays", type=Path, default=None, help="folder of texts for sb_niah_multikey_1's haystack")
    parser.add_argument("--gpus", type=int, default=1, help="0 runs on the CPU")
    parser.add_argument("--places", type=int, default=2, help="jobs at a time on each GPU")
    parser.add_argument("--max-seconds", type=float, default=None, help="end then; the same command goes on")
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1.5e-3, 3e-3, 6e-3])
    parser.add_argument("--tokens", type=int, default=131_072_000, help="of a chosen run")
    parser.add_argument("--search-tokens", type=int, default=19_660_800, help="of a run of the learning-rate search")
    parser.add_argument("--validation-tokens", type=int, default=524_288 + 1)
    parser.add_argument("--seeds", type=int, default=3, help="of stick-breaking and RoPE")
    parser.add_argument("--extension-tokens", type=int, default=26_214_400)
    parser.add_argument("--extension-rate", type=float, default=5e-4, help="learning rate of the extension at its peak")
    parser.add_argument("--stream-blocks", type=int, default=8, help="text of each stream evaluation in 64x lengths")
    parser.add_argument("--target-blocks", type=int, default=120, help="target blocks of each fixed-target evaluation")
    parser.add_argument("--needle-samples", type=int, default=25)
    parser.add_argument("--recall-pairs", type=int, nargs="*", default=[PICTURE_PAIRS, *PAIRS])
    parser.add_argument("--recall-steps", type=int, default=3000, help="most steps of an MQRAR model")
    parser.add_argument("--speed", type=Path, default=None, help="benchmarks/training.py, to run on a GPU of its own")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths and batches, with a tiny model")
    options = vars(parser.parse_args(arguments))
    gpus, places, max_seconds = options.pop("gpus"), options.pop("places"), options.pop("max_seconds")
    speed = options.pop("speed")
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    plan = Plan(**options, device="cuda" if gpus else "cpu")
    plan.out.mkdir(parents=True, exist_ok=True)
    (plan.out / "plan.json").write_text(json.dumps(dataclasses.asdict(plan), default=str, indent=1), encoding="utf-8")
    jobs = jobs_of(plan) + recall_jobs(plan)
    if speed is not None:
        measure = [sys.executable, str(speed), "--out", str(plan.out / "training_speed.json")]
        measure += ["--sizes", "tiny", "--length", "128", "--seconds", "0.2"] if plan.shrink > 1 else []
        jobs.insert(0, Job(name="training_speed", command=lambda: measure, urgency=10, alone=True))
    # processes share the machine's cores
    threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "true"}
    left = run_queue(jobs, plan.out, gpus=gpus, places=places, max_seconds=max_seconds, environment=threads)
    print(f"{len(jobs) - len(left)} of {len(jobs)} jobs done" + (f"; not done: {', '.join(left)}" if left else ""))
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
