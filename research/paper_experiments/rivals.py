"""Evaluates a RoPE model with what others do beyond the training length, beside a stick-breaking model.

    python -m research.paper_experiments.held_out_text stdlib.jsonl.gz
    python -m research.paper_experiments.rivals --held-out stdlib.jsonl.gz --out build/rivals
    tar -czf rivals.tar.gz -C build/rivals results jobs.jsonl machine.json longrope_16.json

The models are the shipped ones, trained on the same 524 million tokens at a length of 1024, and the targets those of
`extrapolation`. Numbers follow from the training length, those of YaRN and SelfExtend for 4, 16 and 64 times of it;
LongRoPE's factors alone are searched (`longrope_factors`, on other text, at 16 times). `add_results` of
the tables of docs/results/extrapolation were made from the archive.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from research.paper_experiments.job_queue import Job, run_queue

LENGTH_TOKENS = 1024
CHECKPOINTS = Path("sbeval/demo/checkpoints")
WAYS = {
    "": "",
    "dynamic_4": "rope_scaling=dynamic:4",
    "yarn_4": "rope_scaling=yarn:4",
    "yarn_16": "rope_scaling=yarn:16",
    "yarn_64": "rope_scaling=yarn:64",
    "log_length": "extrapolation=log_length",
    "dynamic_4_log_length": "rope_scaling=dynamic:4,extrapolation=log_length",
    "sink_window_4_1020": "extrapolation=sink_window:4:1020",
    "dual_chunk_768_256": "extrapolation=dual_chunk:768:256",
    "dual_chunk_512_512": "extrapolation=dual_chunk:512:512",
    "self_extend_32_256": "extrapolation=self_extend:32:256",
    "self_extend_128_256": "extrapolation=self_extend:128:256",
    "self_extend_8_512": "extrapolation=self_extend:8:512",
    "self_extend_32_512": "extrapolation=self_extend:32:512",
    "self_extend_128_512": "extrapolation=self_extend:128:512",
    "longrope_16": "extrapolation=longrope:{out}/longrope_16.json",
}
"""Arguments of the model by the end of a result's name: SelfExtend reaches group * (1024 - window) + window tokens."""
SEARCH = "longrope_16"
"""The job that searches factors, and what its result is called."""
TASKS = {"sb_stdlib_stream": (64, 8), "sb_stdlib_fixed_target": (16, 120)}
"""Longest multiple of the training length, and the limit in blocks of text."""


def evaluation(name: str, arguments: str, task: str, *, held_out: Path, out: Path, device: str) -> list[str]:
    """Returns the command of one evaluation of the model whose folder begins the name."""
    multiple, limit = TASKS[task]
    lengths = [LENGTH_TOKENS // 4]
    while lengths[-1] < multiple * LENGTH_TOKENS:
        lengths.append(2 * lengths[-1])
    given = [
        f"pretrained={CHECKPOINTS / name.removeprefix('demo_').partition('_')[0]}",
        f"dtype={'bfloat16' if device == 'cuda' else 'float32'}",
        f"max_length={lengths[-1]}",
        *([arguments.format(out=out)] if arguments else []),
    ]
    command = [sys.executable, "-P", "-m", "sbeval", "run", "--tasks", task, "--device", device]
    command += ["--model_args", ",".join(given), "--limit", str(limit), "--batch_size", "8"]
    command += ["--metadata", json.dumps({"data_path": str(held_out), "context_lengths": lengths})]
    return [*command, "--output_path", str(out / "results" / name)]


def jobs_of(held_out: Path, out: Path, device: str) -> list[Job]:
    """Returns every evaluation, by a name that ends in its task."""
    named = {"demo_stickbreaking": ""} | {
        "_".join(["demo_rope", *([end] if end else [])]): arguments for end, arguments in WAYS.items()
    }
    factors = [sys.executable, "-P", "-m", "research.paper_experiments.longrope_factors", str(CHECKPOINTS / "rope")]
    search = Job(name=SEARCH, command=lambda: [*factors, str(out / f"{SEARCH}.json")], urgency=100)
    return [search] + [
        Job(
            name=f"{name}-{task}",
            command=lambda name=name, arguments=arguments, task=task: evaluation(  # type: ignore[misc]
                name, arguments, task, held_out=held_out, out=out, device=device
            ),
            urgency=TASKS[task][0],
            needs=(SEARCH,) if name.endswith(SEARCH) else (),
        )
        for name, arguments in named.items()
        for task in TASKS
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the evaluations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", type=Path, required=True, help="text to evaluate on (`held_out_text`)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="0 runs on the CPU")
    parser.add_argument("--places", type=int, default=3, help="jobs at a time on each GPU")
    parser.add_argument("--max-seconds", type=float, default=None, help="end then; the same command goes on")
    parser.add_argument("--commit", default=None, help="of the code, where git cannot be asked")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    jobs = jobs_of(options.held_out, options.out, "cuda" if options.gpus else "cpu")
    left = run_queue(
        jobs,
        options.out,
        gpus=options.gpus,
        places=options.places,
        max_seconds=options.max_seconds,
        environment={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"},
    )
    machine = {"gpus": options.gpus, "seconds": round(time.monotonic() - started, 1)}
    machine |= {"gpu": _gpu() if options.gpus else None, "commit": options.commit or _commit()}
    (options.out / "machine.json").write_text(json.dumps(machine), encoding="utf-8")
    print(f"{len(jobs) - len(left)} of {len(jobs)} jobs done" + (f"; not done: {', '.join(left)}" if left else ""))
    sys.exit(1 if left else 0)


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def _commit() -> str | None:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


if __name__ == "__main__":
    main()
