"""Searches LongRoPE's factors for a checkpoint (Ding et al. 2024, arXiv 2402.13753) and writes them as a RoPE scaling.

    python -m research.paper_experiments.longrope_factors sbeval/demo/checkpoints/rope factors.json --length 16384

Factors rise with the pair's number and lie between 1 and 1.25 times the window by the training length. A population
that begins with linear, NTK and YaRN-like factors is mutated and crossed; what counts is the NLL of each window's last
quarter. The text is Python code of PyTorch's, which is no evaluation text. Two things of the paper are left out: first
tokens that stay unscaled, which transformers' form does not hold, and fine-tuning.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from sbeval.models import SbevalForCausalLM
from sbeval.models.rope import setting_rope_frequencies

TEXT = Path(torch.__file__).parent / "_inductor"
KEPT = 16


def windows_of(tokenizer: object, text: Path, length: int, count: int) -> Tensor:
    """Returns int64 [count, length + 1] tokens of the files of a folder, joined in the order of their names."""
    tokens: list[int] = []
    for file in sorted(text.rglob("*.py")):
        tokens += tokenizer(file.read_text(encoding="utf-8", errors="replace"))["input_ids"]  # type: ignore[operator]
        if len(tokens) >= count * (length + 1):
            return torch.tensor(tokens[: count * (length + 1)]).view(count, length + 1)
    raise SystemExit(f"Expected {count * (length + 1)} tokens in {text}, found {len(tokens)}: name another folder.")


@torch.no_grad()
def loss(model: SbevalForCausalLM, windows: Tensor, factors: Sequence[float], stretch: float) -> float:
    """Returns the NLL in nats a token of each window's last quarter."""
    length = windows.shape[1] - 1
    scored = length // 4
    scaling = {"rope_type": "longrope", "factor": stretch, "long_factor": list(factors), "short_factor": list(factors)}
    total = 0.0
    with setting_rope_frequencies(model, length, scaling):
        for window in windows:
            logits = model(input_ids=window[None, :-1], use_cache=False, logits_to_keep=scored).logits[0]
            total += float(cross_entropy(logits.float(), window[-scored:]))
    return total / len(windows)


def beginnings(pairs: int, stretch: float) -> list[list[float]]:
    """Returns linear, NTK and YaRN-like factors."""
    shares = [pair / (pairs - 1) for pair in range(pairs)]
    ramps = [
        [1 + (stretch - 1) * min(1.0, max(0.0, (share - low) / 0.3)) for share in shares] for low in (0.2, 0.4, 0.6)
    ]
    return [[stretch] * pairs, [stretch**share for share in shares], *ramps]


def rising(factors: Sequence[float], stretch: float) -> list[float]:
    """Returns the factors within their bounds, none below the one before it."""
    found, highest = [], 1.0
    for factor in factors:
        highest = max(highest, min(factor, 1.25 * stretch))
        found.append(highest)
    return found


def search(
    model: SbevalForCausalLM, windows: Tensor, *, stretch: float, rounds: int, tries: int, seed: int = 0
) -> tuple[list[float], float]:
    """Returns the best factors and their loss."""
    draw = random.Random(seed)
    pairs = len(model.rope_frequencies_for(1).inv_freq)
    scored = {tuple(factors): loss(model, windows, factors, stretch) for factors in beginnings(pairs, stretch)}
    for number in range(rounds):
        best = sorted(scored, key=lambda factors: scored[factors])[:KEPT]
        for _ in range(tries):
            one, other = draw.choice(best), draw.choice(best)
            cut = draw.randrange(pairs) if draw.random() < 0.5 else pairs
            child = [
                factor * (math.exp(draw.gauss(0, 0.3)) if draw.random() < 0.3 else 1)
                for factor in (*one[:cut], *other[cut:])
            ]
            made = tuple(rising(child, stretch))
            if made not in scored:
                scored[made] = loss(model, windows, made, stretch)
        print(f"round {number + 1} of {rounds}: {min(scored.values()):.4f} nats", flush=True)
    found = min(scored, key=lambda factors: scored[factors])
    return list(found), scored[found]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int, default=16384, help="tokens of a window")
    parser.add_argument("--text", type=Path, default=TEXT, help="folder of Python files")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tries", type=int, default=48, help="new factors a round")
    options = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    model = SbevalForCausalLM.from_pretrained(options.checkpoint, dtype=torch.bfloat16 if on_gpu else torch.float32)
    model = model.eval().to("cuda" if on_gpu else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    windows = windows_of(tokenizer, options.text, options.length, options.windows).to(model.device)
    stretch = options.length / model.config.training_length_tokens
    factors, nats = search(model, windows, stretch=stretch, rounds=options.rounds, tries=options.tries)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    scaling = {"factor": stretch, "long_factor": [round(factor, 4) for factor in factors]}
    options.out.write_text(json.dumps(scaling), encoding="utf-8")
    print(f"{nats:.4f} nats with {options.out}")


if __name__ == "__main__":
    main()
