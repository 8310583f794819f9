"""Windows of an 8B model with `sb`, and matmuls that run as long: a GPU under load lowers its clock.

    PYTHONPATH=benchmarks:benchmarks/architectures python benchmarks/architectures/windows.py

Eight layers of Llama 3 8B's sizes with its vocabulary (bf16, random weights) score 131,072 tokens through
`loglikelihood_rolling`, in windows of each length. In turns with that, a product of 8,192 x 8,192 random numbers runs
for as long, and one layer's attention of one window, as PyTorch has it and as `sb` does; ten products alone follow a
second's rest. Rates are of the
arithmetic that the definitions ask for, in TFLOP/s; a query attends to the keys before it alone. Times are medians of
`--rounds` turns after one; clock and power are medians of what nvidia-smi reads every 50 ms of the last turn.
Without a GPU all is small, and says only that it runs.
"""

import argparse
import functools
import logging
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any, Self

import families
import torch
from measuring import machine
from torch.nn.functional import scaled_dot_product_attention

from sbeval.models.softmax import softmax_attention

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LLAMA: dict[str, Any] = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"head_dim": 128, "vocab_size": 128256, "num_hidden_layers": 8},
}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 2}
LENGTHS = "16384,65536,131072" if GPU else "64,128"
TOKENS = 131072 if GPU else 512
SQUARE = 8192 if GPU else 256
TOGETHER = 10
REST_SECONDS = 1.0 if GPU else 0.0
WORKS = ("windows", "products", "PyTorch's attention", "attention", "rested products")


def layer_attention(length: int, config: Any) -> float:
    """Returns the floating-point operations of one layer's attention in one window."""
    return 2.0 * config.num_attention_heads * config.head_dim * float(length) ** 2


def whole_windows(length: int, config: Any) -> float:
    """Those of all windows together."""
    both_heads = config.num_attention_heads + config.num_key_value_heads
    weights = config.hidden_size * (2 * both_heads * config.head_dim + 3 * config.intermediate_size)
    products = 2.0 * TOKENS * (config.num_hidden_layers * weights + config.hidden_size * config.vocab_size)
    return products + config.num_hidden_layers * layer_attention(length, config) * TOKENS / length


def seconds_of_one(call: Callable[[], Any], fill_seconds: float) -> float:
    """Returns the seconds per call, over as many calls as fill a time, at least `TOGETHER`."""
    calls, started = 0, now()
    while calls == 0 or now() - started < fill_seconds:
        for _ in range(TOGETHER):
            call()
        calls += TOGETHER
    return (now() - started) / calls


def now() -> float:
    """Returns the time in seconds, after the GPU has finished all work."""
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


class Readings:
    """Clock in MHz and power in watts while a block runs, as text; empty without a GPU."""

    def __enter__(self) -> Self:
        self._lines = tempfile.TemporaryFile("w+")
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "50"]
        query += ["--id", os.environ.get("CUDA_VISIBLE_DEVICES", "0")]
        self._process = subprocess.Popen(query, stdout=self._lines) if GPU else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._lines.seek(0)
        read = [line.split(",") for line in self._lines if line.count(",") == 1]
        self._lines.close()
        clocks, watts = ([float(pair[column]) for pair in read] for column in (0, 1))
        self.shown = f" ({statistics.median(clocks):.0f} MHz, {statistics.median(watts):.0f} W)" if read else ""


def measured(length: int, rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    """TFLOP/s of each work, and how the GPU ran meanwhile."""
    lm = families.loaded("llama", "sb", length)
    config = lm.model.config
    shape = (1, config.num_attention_heads, length, config.head_dim)
    heads = [torch.randn(shape, device=DEVICE).to(torch.bfloat16) for _ in range(3)]
    left, right = (torch.randn(SQUARE, SQUARE, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    product = functools.partial(torch.mm, left, right, out=torch.empty_like(left))
    calls: dict[str, Callable[[], Any]] = {
        **dict.fromkeys(("products", "rested products"), product),
        "PyTorch's attention": functools.partial(scaled_dot_product_attention, *heads, is_causal=True),
        "attention": functools.partial(softmax_attention, *heads, scale=config.head_dim**-0.5),
    }
    operations = {work: layer_attention(length, config) if "attention" in work else 2.0 * SQUARE**3 for work in calls}
    operations["windows"] = whole_windows(length, config)
    times: dict[str, list[float]] = {work: [] for work in WORKS}
    shown: dict[str, str] = {}
    for _ in range(1 + rounds):
        for work in WORKS:
            if work == "rested products":
                time.sleep(REST_SECONDS)
            with Readings() as readings:
                if work == "windows":
                    started = now()
                    families.window(lm, TOKENS)
                    times[work].append(now() - started)
                else:
                    fill_seconds = 0.0 if work == "rested products" else times["windows"][-1]
                    times[work].append(seconds_of_one(calls[work], fill_seconds))
            shown[work] = readings.shown
    return {work: operations[work] / statistics.median(times[work][1:]) / 1e12 for work in WORKS}, shown


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    families.FAMILIES["llama"] = LLAMA if GPU else {**LLAMA, **SMALL}
    print(machine())
    print(
        "| window | windows | products as long | share | PyTorch's attention as long | attention of `sb` as long | ",
        end="",
    )
    print("products after a rest | share |")
    for length in map(int, arguments.lengths.split(",")):
        with torch.no_grad():
            rate, shown = measured(length, arguments.rounds)
        cells = [f"{length:,}"] + [f"{rate[work]:.0f}{shown[work]}" for work in WORKS]
        for place, products in ((3, "products"), (7, "rested products")):
            cells.insert(place, f"{rate['windows'] / rate[products]:.2f}")
        print("|", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
