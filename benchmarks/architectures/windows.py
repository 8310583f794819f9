"""Windows of an 8B through `sb` beside matrix products that run as long, since a GPU's clock falls with its load.

    PYTHONPATH=benchmarks:benchmarks/architectures python benchmarks/architectures/windows.py [--lengths 16384,65536,131072]

Eight layers of Llama 3 8B's sizes with its vocabulary (bf16, random weights) score 131,072 tokens in windows of each
length, through `loglikelihood_rolling`. Then a product of 8,192 x 8,192 random numbers runs as long, then cuDNN's causal
attention of the model's heads, each in `--rounds` turns; and once more, after a second's rest, ten products alone.
Rates are of the arithmetic that the model's definition asks for, in TFLOP/s; attention counts the keys seen. Clock and
power are medians of what nvidia-smi reads every 50 ms. Without a GPU all is small, and says only that it runs.
"""

import argparse
import functools
import logging
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import torch
from measuring import machine

GPU = torch.cuda.is_available()
LLAMA: dict[str, Any] = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"head_dim": 128, "vocab_size": 128256},
}
LAYERS = 8
TOKENS = 131072 if GPU else 512
SQUARE = 8192 if GPU else 256
BURST = 10
REST_SECONDS = 1.0


def operations(length: int, config: Any) -> tuple[float, float]:
    """What scoring `TOKENS` tokens in windows of a length takes in multiplications and additions; attention's share."""
    heads, grouped, wide = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
    layer = wide * config.head_dim * 2 * (heads + grouped) + 3 * wide * config.intermediate_size
    products = 2.0 * TOKENS * (config.num_hidden_layers * layer + wide * config.vocab_size)
    return products, config.num_hidden_layers * attention_operations(length, config) * TOKENS / length


def attention_operations(length: int, config: Any) -> float:
    """Of one layer's attention in one window."""
    return 2.0 * config.num_attention_heads * config.head_dim * float(length) ** 2


def timed(call: Callable[[], Any], seconds: float, share: float = 1.0) -> float:
    """Seconds of one call: of as many as fill the time."""
    wait()
    started, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - started < seconds * share:
        for _ in range(BURST):
            call()
        wait()
        calls += BURST
    return (time.perf_counter() - started) / calls


def wait() -> None:
    """Until the GPU is done."""
    if GPU:
        torch.cuda.synchronize()


class Readings:
    """Clock in MHz and power in watts while a block runs."""

    def __enter__(self) -> "Readings":
        self._file = Path(tempfile.mkstemp()[1])
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "50", "--id=0"]
        self._process = subprocess.Popen(query, stdout=self._file.open("w")) if GPU else None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        lines = [line.split(", ") for line in self._file.read_text().splitlines()]
        self._file.unlink()
        values = [(float(line[0]), float(line[1])) for line in lines if len(line) == 2]
        self.shown = ", ".join(
            f"{statistics.median(column):.0f} {unit}" for column, unit in zip(zip(*values), ("MHz", "W"))
        )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="16384,65536,131072" if GPU else "64,128")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    families.COMMON = {**families.COMMON, "num_hidden_layers": LAYERS}
    families.FAMILIES["llama"] = LLAMA if GPU else {**LLAMA, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    left, right = (torch.randn(SQUARE, SQUARE, device="cuda" if GPU else "cpu").to(torch.bfloat16) for _ in range(2))
    product = functools.partial(torch.mm, left, right, out=torch.empty_like(left))
    product_operations = 2.0 * SQUARE**3
    print(machine())
    print("| window | all, s | TFLOP/s | product alongside | share | attention alone | ten products after a rest | share |")
    with torch.no_grad():
        for length in map(int, arguments.lengths.split(",")):
            lm = families.loaded("llama", "sb", length)
            config = lm.model.config
            query, key, value = (
                torch.randn(1, config.num_attention_heads, length, config.head_dim, device=left.device).to(left.dtype)
                for _ in range(3)
            )
            attend = functools.partial(
                torch.nn.functional.scaled_dot_product_attention, query, key, value, is_causal=True
            )
            times: dict[str, list[float]] = {"windows": [], "product": [], "attention": [], "rested": []}
            shown: dict[str, str] = {}
            for turn in range(1 + arguments.rounds):
                for name in times:
                    if name == "rested":
                        time.sleep(REST_SECONDS if GPU else 0)
                    with Readings() as readings:
                        if name == "windows":
                            wait()
                            started = time.perf_counter()
                            families.window(lm, TOKENS)
                            wait()
                            took = time.perf_counter() - started
                        else:
                            call = attend if name == "attention" else product
                            took = timed(call, 0 if name == "rested" else max(times["windows"], default=0.0))
                    if turn:
                        times[name].append(took)
                        shown[name] = readings.shown
            seconds = {name: statistics.median(values) for name, values in times.items()}
            rate = sum(operations(length, config)) / seconds["windows"] / 1e12
            products = [product_operations / seconds[name] / 1e12 for name in ("product", "rested")]
            attention = attention_operations(length, config) / seconds["attention"] / 1e12
            print(
                f"| {length:,} | {seconds['windows']:.3f} | {rate:.0f} ({shown['windows']}) | {products[0]:.0f} "
                f"({shown['product']}) | {rate / products[0]:.2f} | {attention:.0f} ({shown['attention']}) | "
                f"{products[1]:.0f} | {rate / products[1]:.2f} |",
                flush=True,
            )
            del lm


if __name__ == "__main__":
    main()
