"""How long programs walk under other rules, simulated on the sticks of a checkpoint's real activations.

    python -m research.kernel_studies.walks [--length 65536] [--thresholds 0 1e-5 3e-3]

A program walks the keys of one block of 64 rows, newest tile of 64 keys first, and looks at its rows' sticks now and
then; it ends at the first look that finds them all below the threshold. The largest stick of every block after every
tile is computed once, in fp32 (a threshold of 0 stands for the exact stop, fp32's smallest normal number). From it
follow, for every rule of when to look, the tiles visited, the looks, and the work with a look as dear as `LOOK_TILES`
tiles and a program as dear as `PROGRAM_TILES` besides: as multiples of a walk that never stops. The second table cuts
walks into segments, programs of their own that start after all newer ones and know nothing of what those left: how much
longer the layers take then, with `SLOTS` programs at a time, each tile as long as any other.
"""

import argparse
import heapq
import math
from collections.abc import Callable
from pathlib import Path

import torch
from activations import SHIPPED, LayerInputs, captured, load, set_kernels, text_window
from torch.nn.functional import softplus

from sbeval.models.attention import StickBreakingKernels

ROWS = KEYS = 64
LOOK_TILES, PROGRAM_TILES = 0.64, 3.0
SLOTS = 3 * 132
ROWS_AT_ONCE, KEYS_AT_ONCE = 512, 4096
EXACT_LOG2 = -126.0

Rule = Callable[[int, int, float, float, float], int]
"""From the last chunk's limit and tiles, the log2 sticks before and after it and the threshold to the next limit."""


def largest_sticks(layer: LayerInputs, head: int) -> list[list[float]]:
    """Log2 of the largest stick of each block of rows after each of its tiles, newest first, down to the exact stop."""
    q = layer.q[0, head] * layer.scale
    k = layer.k[0, head // (layer.q.shape[1] // layer.k.shape[1])]
    blocks: list[list[float]] = []
    for first in range(0, len(q), ROWS_AT_ONCE):
        row = torch.arange(first, min(len(q), first + ROWS_AT_ONCE))
        newest = row if layer.attend_current else row - 1
        log_stick, parts, end = torch.zeros(len(row)), [], int(row[-1]) + 1
        while end > 0 and log_stick.max() > EXACT_LOG2 * math.log(2.0):
            key = torch.arange(max(0, end - KEYS_AT_ONCE), end)
            spent = softplus(q[row] @ k[key].T).masked_fill(key[None] > newest[:, None], 0.0)
            left = log_stick[:, None] - spent.view(len(row), -1, KEYS).sum(-1).flip(-1).cumsum(-1)
            parts.append(left.view(-1, ROWS, left.shape[1]).amax(1))
            log_stick, end = left[:, -1], int(key[0])
        ahead = len(row) // ROWS
        for index, sticks in enumerate(torch.cat(parts, dim=1) / math.log(2.0)):
            blocks.append(sticks[ahead - 1 - index :].tolist())  # what is newer than the block is no tile of its own
    return blocks


def every(most: int) -> Rule:
    """Twice as many tiles each time, up to `most`."""
    return lambda limit, tiles, before, left, threshold: min(2 * limit, most)


def forecast(most: int, share: float, fewest: int) -> Rule:
    """A share of the tiles that would spend the stick, going by the last chunk's."""

    def rule(limit: int, tiles: int, before: float, left: float, threshold: float) -> int:
        fallen = max(before - left, 2.0**-20)
        return int(max(min(share * tiles * (left - threshold) / fallen, 2 * limit, most), fewest))

    return rule


def walk(sticks: list[float], rule: Rule, threshold: float, *, tiles: int, first: int) -> tuple[int, int, float]:
    """Tiles visited, looks, and the log2 stick at the end, when `first` tiles are read before the first look."""
    before, limit, done, looks = 0.0, 2, min(first, tiles), 1
    left = sticks[done - 1] if done else 0.0
    while left >= threshold and done < tiles:
        steps = min(limit, tiles - done)
        done += steps
        looks += 1
        before, left = left, sticks[done - 1] if done <= len(sticks) else -math.inf
        limit = rule(limit, steps, before, left, threshold) if left > -math.inf else limit
    return done, looks, left


def longest_first(jobs: list[float]) -> float:
    """When the last of the jobs ends that are taken in this order by `SLOTS` programs."""
    ends = [0.0] * SLOTS
    for job in jobs:
        heapq.heapreplace(ends, ends[0] + job)
    return max(ends)


def segmented(layers: list[list[list[list[float]]]], threshold: float, segment: int) -> float:
    """Time of all layers, in tiles, with walks cut into segments of so many tiles."""
    rule, total = forecast(64, 0.5, 2), 0.0
    for heads in layers:
        newest, older = [], []
        for block in reversed(range(len(heads[0]))):
            for sticks in (head[block] for head in heads):
                passed = 0.0
                for start in range(0, block + 1, segment):
                    if passed < threshold:
                        older.append(1.0)  # finds the stick spent
                        continue
                    own = [stick - passed for stick in sticks[start : start + segment]]
                    tiles = min(segment, block + 1 - start)
                    done, looks, left = walk(own, rule, threshold, tiles=tiles, first=1)
                    (older if start else newest).append(done + LOOK_TILES * looks + PROGRAM_TILES)
                    passed += left
        total += longest_first(newest + older)
    return total


@torch.no_grad()
def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=SHIPPED)
    parser.add_argument("--length", type=int, default=65536)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.0, 1e-5, 3e-3])
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.checkpoint, device="cpu", dtype=torch.float32)
    set_kernels(model, StickBreakingKernels(skip_threshold=1e-7))
    inputs = captured(model, text_window(tokenizer, arguments.length))
    layers = [[largest_sticks(layer, head) for head in range(layer.q.shape[1])] for layer in inputs]
    heads = [head for layer in layers for head in layer]
    causal, programs = sum(len(head) * (len(head) + 1) // 2 for head in heads), sum(map(len, heads))
    rules = {"every 8": every(8), "every 16": every(16), "every 32": every(32)}
    for share, fewest in ((0.5, 2), (0.75, 4), (1.0, 2), (1.0, 4)):
        rules[f"{share:g} of the forecast, {fewest} to 64"] = forecast(64, share, fewest)
    print(f"{arguments.checkpoint.name}, {arguments.length} tokens\n")
    print("| threshold | rule | dense tiles / tiles | looks | dense work / work |")
    print("|---|---|---|---|---|")
    logs = {
        f"{threshold:g}" if threshold else "exact": math.log2(threshold) if threshold else EXACT_LOG2
        for threshold in arguments.thresholds
    }
    for name, threshold in logs.items():
        for text, rule in rules.items():
            walks = [
                walk(sticks, rule, threshold, tiles=block + 1, first=1)
                for head in heads
                for block, sticks in enumerate(head)
            ]
            tiles, looks = sum(done for done, _, _ in walks), sum(looks for _, looks, _ in walks)
            work = (1 + LOOK_TILES / 32) * causal / (tiles + LOOK_TILES * looks + PROGRAM_TILES * programs)
            print(f"| {name} | {text} | {causal / tiles:.3f} | {looks} | {work:.3f} |", flush=True)
    print("\n| threshold | segments of | time of all layers, of that of whole walks |")
    print("|---|---|---|")
    for name, threshold in logs.items():
        whole = segmented(layers, threshold, arguments.length // KEYS)
        for segment in (512, 256):
            print(f"| {name} | {segment} tiles | {segmented(layers, threshold, segment) / whole:.3f} |", flush=True)


if __name__ == "__main__":
    main()
