"""How fast FIRE learns its biases: small byte models on a CPU, biases at the rate of the other weights and at more.

    OMP_NUM_THREADS=1 python -m research.paper_experiments.fire_rates --out FOLDER

Everything but the attention and the rate of FIRE's own weights is the same, the tokens and their order included. The
text is the standard library of the interpreter that runs this; the models are evaluated nowhere. FOLDER then holds
`fire_rates.json`, the command and the machine, ready for `add_results.py`.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sbeval.models import SbevalConfig, SbevalForCausalLM
from sbeval.models.biases import FireBias
from sbeval.training.losses import next_token_loss
from sbeval.training.trainer import cosine

LENGTH_TOKENS, BATCH_WINDOWS, RATE, WARMUP_STEPS = 256, 8, 3e-3, 30
TEXT_BYTES = 2_000_000
LAST_STEPS = 40
RUNS: tuple[tuple[str, float], ...] = (("rope", 1.0), ("fire", 1.0), ("fire", 10.0))
"""Attention, and how many times the rate of the other weights its biases are learnt at."""


def text() -> torch.Tensor:
    """Returns [TEXT_BYTES] bytes of Python source."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(np.frombuffer(b"".join(file.read_bytes() for file in files)[:TEXT_BYTES], np.uint8).astype(int))


def train(source: torch.Tensor, attention: str, factor: float, steps: int) -> dict[str, Any]:
    """Returns the mean loss of the last steps and the range of the trained biases."""
    torch.manual_seed(0)
    model: Any = SbevalForCausalLM(
        SbevalConfig(
            attention=attention,
            vocab_size=256,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=4,
            num_attention_heads=2,
            tie_word_embeddings=True,
            training_length_tokens=LENGTH_TOKENS,
        )
    ).train()
    biases = [module for module in model.modules() if isinstance(module, FireBias)]
    of_biases = {parameter for bias in biases for parameter in bias.parameters()}
    groups = [
        {"params": [weight for weight in model.parameters() if weight not in of_biases], "lr": RATE},
        {"params": list(of_biases), "lr": factor * RATE, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine(step, steps=steps, warmup_steps=min(WARMUP_STEPS, steps))
    )
    order = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(source) - LENGTH_TOKENS, (BATCH_WINDOWS, 1), generator=order)
        loss = next_token_loss(model, source[starts + torch.arange(LENGTH_TOKENS + 1)])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return {
        "attention": attention,
        "bias_rate_factor": factor,
        "rate": RATE,
        "steps": steps,
        "tokens": steps * BATCH_WINDOWS * LENGTH_TOKENS,
        "parameters": model.num_parameters(),
        "nll": statistics.fmean(losses[-LAST_STEPS:]),
        "bias_range": statistics.fmean(bias_range(bias) for bias in biases) if biases else None,
    }


@torch.no_grad()
def bias_range(bias: FireBias) -> float:
    """Returns how far apart the biases of the nearest and the farthest key are, as a mean over heads."""
    last = torch.tensor([[LENGTH_TOKENS - 1]])
    nearest_and_farthest = torch.tensor([[0, LENGTH_TOKENS - 1]])
    return float(bias(last, nearest_and_farthest)[0, :, 0].diff(dim=-1).abs().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    started = time.monotonic()
    source = text()
    rows = [train(source, attention, factor, options.steps) for attention, factor in RUNS]
    seconds = round(time.monotonic() - started, 1)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {"python": platform.python_version(), "torch": torch.__version__, "last_steps": LAST_STEPS, "runs": rows}
    (options.out / "fire_rates.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    words = ["python", "-m", "research.paper_experiments.fire_rates", *sys.argv[1:]]
    job = {"job": "fire_rates", "gpu": None, "seconds": seconds, "exit_code": 0, "command": shlex.join(words)}
    (options.out / "jobs.jsonl").write_text(json.dumps(job) + "\n", encoding="utf-8")
    machine = {"gpus": 0, "seconds": seconds, "gpu": None}
    (options.out / "machine.json").write_text(json.dumps(machine), encoding="utf-8")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
