"""How much of the causal triangle skipping has to visit: tiles by layer and head on a checkpoint's real activations.

    python benchmarks/tile_shares.py [--checkpoint FOLDER ...] [--lengths 4096 16384] [--thresholds 1e-6 1e-5 1e-4]

For every query the walk from the newest key backwards is done in fp32 in steps of 16 keys, and the oldest step is kept
at which less than the threshold is left of its stick. All tile shapes follow from that: a block of rows goes on until
its last row has stopped. Tiles that the causal mask leaves whole or in part are counted; nothing is sampled. A
threshold of 0 stands for the exact stop, at which the stick is zero in fp32 (2^-150).
"""

import argparse
import math
from pathlib import Path

import torch
from activations import SHIPPED, LayerInputs, captured, load, set_kernels, text_window
from torch import Tensor
from torch.nn.functional import softplus

from sbeval.models.attention import StickBreakingKernels

STEP = 16
ROWS_AND_KEYS = {"cpu": (256, 2048), "cuda": (1024, 16384)}
EXACT_STOP_LOG = -150 * 0.6931471805599453


def stops(layer: LayerInputs, head: int, thresholds: list[float]) -> Tensor:
    """Returns int64 [thresholds, L]: the oldest position each query has to visit, a multiple of 16."""
    shared = layer.q.shape[1] // layer.k.shape[1]
    q = layer.q[0, head].float() * layer.scale
    k = layer.k[0, head // shared].float()
    length = q.shape[0]
    limits = [math.log(t) if t > 0 else EXACT_STOP_LOG for t in thresholds]
    device = q.device
    block_rows, block_keys = ROWS_AND_KEYS[device.type]
    found = torch.zeros(len(thresholds), length, dtype=torch.int64, device=device)
    for first in range(0, length, block_rows):
        row = torch.arange(first, min(length, first + block_rows), device=device)
        log_stick = torch.zeros(len(row), device=device)
        open_rows = torch.ones(len(thresholds), len(row), dtype=torch.bool, device=device)
        end = -(-min(length, first + block_rows) // STEP) * STEP
        while end > 0 and bool(open_rows.any()):
            start = max(0, end - block_keys)
            key = torch.arange(start, min(end, length), device=device)
            spent = softplus(q[row] @ k[key].T)
            if end > first:
                newest = row if layer.attend_current else row - 1
                spent = spent.masked_fill(key[None] > newest[:, None], 0.0)
            if len(key) < end - start:
                spent = torch.nn.functional.pad(spent, (0, end - start - len(key)))
            by_step = spent.view(len(row), -1, STEP).sum(-1).flip(-1)
            left = log_stick[:, None] - by_step.cumsum(-1)
            for index, limit in enumerate(limits):
                # first step after which the stick is below the threshold
                below = (left >= limit).sum(-1)
                stopped = (below < left.shape[1]) & open_rows[index]
                found[index, row[stopped]] = end - STEP * (below[stopped] + 1)
                open_rows[index] &= ~stopped
            log_stick = left[:, -1]
            end = start
    return found.cpu()


def visited(stops_TL: Tensor, block_rows: int, block_keys: int, attend_current: bool) -> tuple[Tensor, Tensor]:
    """Tiles visited [thresholds, row blocks] and causal tiles [row blocks]."""
    length = stops_TL.shape[1]
    blocks = -(-length // block_rows)
    padded = torch.nn.functional.pad(stops_TL, (0, blocks * block_rows - length), value=length)
    oldest = padded.view(len(stops_TL), blocks, block_rows).amin(-1) // block_keys
    last_row = (torch.arange(1, blocks + 1) * block_rows).clamp(max=length)
    causal = -(-(last_row - (0 if attend_current else 1)) // block_keys)
    return (causal - oldest).clamp(min=0), causal


def table(layers: list[LayerInputs], found: list[Tensor], thresholds: list[float], rows: int, keys: int) -> list[str]:
    """Lines of the table of one tile shape."""
    names = ["exact" if threshold == 0 else f"{threshold:g}" for threshold in thresholds]
    lines = ["| layer | head | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    sums = torch.zeros(len(thresholds))
    total, at = 0, 0
    for number, layer in enumerate(layers):
        for head in range(layer.q.shape[1]):
            seen, causal = visited(found[at], rows, keys, layer.attend_current)
            at += 1
            sums += seen.sum(-1)
            total += int(causal.sum())
            shares = (100 * seen.sum(-1) / causal.sum()).tolist()
            lines.append(f"| {number} | {head} | " + " | ".join(f"{share:.2f}" for share in shares) + " |")
    lines.append("| all | all | " + " | ".join(f"**{100 * float(s) / total:.2f}**" for s in sums) + " |")
    return lines


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, nargs="+", default=[SHIPPED])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0, 1e-6, 1e-5, 1e-4])
    parser.add_argument("--windows", type=int, default=1, help="windows of text, each with tables of its own")
    parser.add_argument("--tiles", nargs="+", default=["64x64", "128x64"], help="rows x keys, multiples of 16 keys")
    parser.add_argument("--save", type=Path, help="file that gets the stops, to look at them further")
    arguments = parser.parse_args()
    longest = max(arguments.lengths)
    for checkpoint in arguments.checkpoint:
        model, tokenizer = load(checkpoint, device="cpu", dtype=torch.float32)
        set_kernels(model, StickBreakingKernels(skip_threshold=1e-7))
        for number in range(arguments.windows):
            layers = captured(model, text_window(tokenizer, longest, number=number))
            found = [stops(layer, head, arguments.thresholds) for layer in layers for head in range(layer.q.shape[1])]
            if arguments.save:
                torch.save({"stops": found, "thresholds": arguments.thresholds}, arguments.save)
            for length in arguments.lengths:
                parts, shorter = [f[:, :length] for f in found], [layer.first(length) for layer in layers]
                for tile in arguments.tiles:
                    rows, keys = (int(size) for size in tile.split("x"))
                    print(f"\n{checkpoint.name}, {length} tokens of window {number}: ", end="")
                    print(f"percent of the causal {rows} x {keys} tiles visited\n")
                    print("\n".join(table(shorter, parts, arguments.thresholds, rows, keys)), flush=True)


if __name__ == "__main__":
    main()
