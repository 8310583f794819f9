"""What a call of attention costs the host: Python and launches, which short texts and generation wait for.

    python -m research.kernel_studies.host_time [--calls 300] [--turns 7]

For each shape, in turns: the call as models make it, without gradients; PyTorch's operator around the same kernels, as
compiled models and gradients use it; and PyTorch's scaled_dot_product_attention. The GPU keeps up at these sizes, and
the clock stops when the host has launched, so a time is the host's alone.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from measuring import machine

from sbeval.attention import stickbreaking_attention
from sbeval.attention.impl.triton import function

SHAPES = {"512 tokens": (512, 512), "1 query, 2048 keys": (1, 2048)}
THRESHOLD = 1e-5


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Mean of so many calls in a row."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - start) / calls


@torch.no_grad()
def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This times launches on a GPU and finds none here, so it measures nothing.")
        return
    print(f"{machine()}\n\nbf16, 4 heads; microseconds of the host a call, median of {arguments.turns} turns\n")
    print("| shape | head_dim | a model's call | the operator | scaled_dot_product_attention |")
    print("|---|---|---|---|---|")
    for shape, (queries, keys) in SHAPES.items():
        for head_dim in (32, 64, 128):
            q, k, v = (
                torch.randn(1, 4, length, head_dim, device="cuda", dtype=torch.bfloat16)
                for length in (queries, keys, keys)
            )
            settings = (head_dim**-0.5, False, None, None, THRESHOLD, False)
            calls = [
                partial(stickbreaking_attention, q, k, v, skip_threshold=THRESHOLD),
                partial(function._forward, q, k, v, *settings),
                partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=queries == keys),
            ]
            for call in calls:
                microseconds(call, 20)
            times = [[microseconds(call, arguments.calls) for call in calls] for _ in range(arguments.turns)]
            medians = [statistics.median(column) for column in zip(*times, strict=True)]
            print(f"| {shape} | {head_dim} | " + " | ".join(f"{median:.0f}" for median in medians) + " |", flush=True)


if __name__ == "__main__":
    main()
