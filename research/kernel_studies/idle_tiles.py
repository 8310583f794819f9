"""Whether tiles inside heads that look far back could be skipped: what they take, what summaries of keys could know.

    python -m research.kernel_studies.idle_tiles [--length 16384] [--every 16]

Of the tiles (64 x 64) that skipping at 1e-5 visits, for the rows past the first quarter: the percentage that takes less
than some part of the stick from every row; the percentage that could be left out where each row block leaves out at
most so much in all; the percentage whose logits all lie below -9; and the percentage that a summary of a key block (a
centre and a radius, or a box for each dimension) proves to take less than 1e-6. Of the row blocks, one in `--every` is
looked at.
"""

import argparse

import torch
from activations import SHIPPED, LayerInputs, captured, load, set_kernels, text_window
from torch import Tensor
from torch.nn.functional import softplus

from sbeval.models.attention import StickBreakingKernels

SIZE = 64
THRESHOLD = 1e-5
TAKEN = (1e-7, 1e-6, 1e-5)
BUDGETS = (1e-5, 1e-4, 1e-3)
LOWEST_LOGIT = -9.0
PROVEN = 1e-6


def idle(layer: LayerInputs, head: int, every: int) -> tuple[float, Tensor]:
    """Percentage of tiles visited, and of those the percentages named above."""
    q = layer.q[0, head].float() * layer.scale
    k = layer.k[0, head // (layer.q.shape[1] // layer.k.shape[1])].float()
    length = len(q) // SIZE * SIZE
    blocks_NSD = k[:length].view(-1, SIZE, k.shape[1])
    centre, low, high = blocks_NSD.mean(1), blocks_NSD.amin(1), blocks_NSD.amax(1)
    radius = (blocks_NSD - centre[:, None]).norm(dim=-1).amax(1)
    own = torch.ones(SIZE, SIZE, dtype=torch.bool).tril(0 if layer.attend_current else -1)
    counts, seen, causal = torch.zeros(len(TAKEN) + len(BUDGETS) + 3), 0, 0
    for block in range(length // SIZE - 1, length // SIZE // 4, -every):
        rows = q[block * SIZE : (block + 1) * SIZE]
        logits = (rows @ k[: block * SIZE].T).view(SIZE, block, SIZE)
        spent = softplus(logits).sum(-1)
        newest = (softplus(rows @ k[block * SIZE : (block + 1) * SIZE].T) * own).sum(1)
        after = spent.flip(1).cumsum(1).flip(1) + newest[:, None]
        stick = (spent - after).exp()
        going = stick.amax(0) >= THRESHOLD
        first = block - int(going.sum())
        causal, seen = causal + block, seen + block - first
        if first == block:
            continue
        stick = stick[:, first:]
        taken = (stick - (-after[:, first:]).exp()).amax(0)
        together = taken.sort().values.cumsum(0)
        ball = rows @ centre[first:block].T + rows.norm(dim=1)[:, None] * radius[first:block]
        box = rows.clamp(min=0) @ high[first:block].T + rows.clamp(max=0) @ low[first:block].T
        proven = [(SIZE * bound.exp() * stick).amax(0) < PROVEN for bound in (ball, box)]
        below = logits[:, first:].amax((0, 2)) < LOWEST_LOGIT
        found = [taken < part for part in TAKEN] + [together < budget for budget in BUDGETS] + [below, *proven]
        counts += torch.stack([which.sum() for which in found])
    return 100 * seen / causal, 100 * counts / max(1, seen)


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--every", type=int, default=16)
    arguments = parser.parse_args()
    model, tokenizer = load(SHIPPED, device="cpu", dtype=torch.float32)
    set_kernels(model, StickBreakingKernels(skip_threshold=1e-7))
    names = [f"takes < {part:g}" for part in TAKEN] + [f"left out to {budget:g}" for budget in BUDGETS]
    names += [f"logits < {LOWEST_LOGIT:g}", "centre, radius", "box"]
    print("| layer | head | visited | " + " | ".join(names) + " |")
    print("|---" * (3 + len(names)) + "|")
    for number, layer in enumerate(captured(model, text_window(tokenizer, arguments.length))):
        for head in range(layer.q.shape[1]):
            visited, shares = idle(layer, head, arguments.every)
            row = f"| {number} | {head} | {visited:.1f} | "
            print(row + " | ".join(f"{share:.1f}" for share in shares.tolist()) + " |", flush=True)


if __name__ == "__main__":
    main()
