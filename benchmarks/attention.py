"""Stick-breaking attention, softmax attention and other stick-breaking kernels: accuracy, speed and memory.

    python benchmarks/attention.py [--lengths 16384 65536] [--head-dims 32 64 128] [--backward] [--peer CHECKOUT]

Every kernel of a shape is measured in one run, on the same values, in turns; times are the 20th, 50th and 80th
percentiles in milliseconds. fla's kernel takes part where it is installed, the authors' where `--peer` names a checkout
of their repository. The output's error is that of the first head's last 256 rows against fp64, the gradients' that of
its first 4,096 tokens. A kernel whose error exceeds the limit, or that fails, gets no speed. The logits lie around -9,
so that no stick breaks and every key is visited: on plain random inputs each stick is gone within some hundred keys and
a kernel that stops there shows nothing of its dense speed.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from attention_kernels import (
    Kernel,
    dense_inputs,
    exact_rows,
    forward_only,
    gradients,
    heads_first,
    kernels,
    laid_out,
)
from measuring import Call, interleaved, machine, peak_bytes, relative_error, shown
from torch import Tensor

ERROR_LIMIT = 8e-3
CHECKED_ROWS = 256
CHECKED_TOKENS = 4096
NAMES = ("o", "dq", "dk", "dv")


def output_error(kernel: Kernel, inputs: list[Tensor]) -> float:
    """Relative error of the first head's last rows at the full length."""
    found = heads_first(kernel, forward_only(kernel.attend, laid_out(kernel, inputs)))[:, :1, -CHECKED_ROWS:]
    q, k, v = (tensor[:, :1] for tensor in inputs)
    return relative_error(found, exact_rows(kernel, q[:, :, -CHECKED_ROWS:], k, v))


def gradient_errors(kernel: Kernel, inputs: list[Tensor], d_output: Tensor) -> list[float]:
    """Relative errors of dq, dk, dv on the first head's first tokens."""
    # all heads take part: kernels that choose their launch parameters by trial would try anew for one head
    part = [tensor[:, :, :CHECKED_TOKENS] for tensor in (*inputs, d_output)]
    *own, d_own = laid_out(kernel, part)
    found = gradients(kernel.attend, own, d_own)
    q, k, v, d_first = (tensor[:, :1].double() for tensor in part)
    exact = gradients(partial(exact_rows, kernel), [q, k, v], d_first)
    return [relative_error(heads_first(kernel, a)[:, :1], b) for a, b in zip(found, exact, strict=True)]


def accurate(errors: list[float]) -> bool:
    """Whether a kernel with these errors is timed. NaN counts as too large."""
    return all(error < ERROR_LIMIT for error in errors)


def table(
    length: int, head_dim: int, arguments: argparse.Namespace, compared: dict[str, Kernel], which: str
) -> list[str]:
    """Rows of one shape and pass."""
    torch.manual_seed(0)
    inputs, d_output = dense_inputs(arguments.heads, length, head_dim)
    errors: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    calls: dict[str, Call] = {}
    peaks: dict[str, int] = {}
    for name, kernel in compared.items():
        try:
            errors[name] = [output_error(kernel, inputs)]
            if which != "forward":
                errors[name] += gradient_errors(kernel, inputs, d_output)
            if not accurate(errors[name]):
                refused[name] = "error too large: no speed"
                continue
            *own, d_own = laid_out(kernel, [*inputs, d_output])
            call: Call = partial(forward_only, kernel.attend, own)
            if which != "forward":
                call = partial(gradients, kernel.attend, own, d_own)
            call()
            peaks[name] = peak_bytes(call)
            calls[name] = call
        except Exception as error:  # a kernel that does not run on this machine is a result
            refused[name] = f"{type(error).__name__}: no speed"
            torch.cuda.empty_cache()
    times = interleaved(calls, milliseconds=arguments.milliseconds)
    flop = (2 if which == "forward" else 7) * arguments.heads * length * length * head_dim
    others = [name for name in compared if name != "sbeval"]
    lines = []
    for name in compared:
        row = f"| {length} | {head_dim} | {which} | {name} | "
        found = errors.get(name, [])
        row += "/".join(f"{error:.1e}" for error in found) + " | "
        base = errors.get("flash (SDPA)", [])
        row += "/".join(f"{a / b:.2f}" for a, b in zip(found, base, strict=False)) + " | "
        if name in refused:
            lines.append(row + f"{refused[name]} | | " + "| " * len(others) + "|")
            continue
        median = times[name][1]
        ratios = [f"{times[other][1] / median:.2f}" if other in times else "" for other in others]
        peak = f"{peaks[name] / 2**20:.0f}"
        lines.append(row + " | ".join([shown(times[name]), f"{flop / median / 1e9:.0f}", *ratios, peak]) + " |")
    return lines


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--backward", action="store_true", help="forward and backward as well")
    parser.add_argument("--peer", type=Path, help="checkout of the authors' stickbreaking-attention repository")
    parser.add_argument("--milliseconds", type=float, default=200.0, help="how long each kernel is timed")
    parser.add_argument("--leave-out", nargs="*", default=[], help="kernels not to measure")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/attention.py measures kernels on a GPU and finds none here, so it measures nothing.")
        return
    compared = {name: kernel for name, kernel in kernels(arguments.peer).items() if name not in arguments.leave_out}
    others = [name for name in compared if name != "sbeval"]
    print(f"{machine()}\n\nbf16, causal, batch x heads = {arguments.heads}; `x NAME` is its time over this row's\n")
    print(
        "| L | D | pass | kernel | error " + "/".join(NAMES) + " | x flash's error | ms p20/p50/p80 | TFLOP/s | ",
        end="",
    )
    print(" | ".join(f"x {name}" for name in others) + " | peak MiB |")
    print("|---" * (9 + len(others)) + "|", flush=True)
    for length in arguments.lengths:
        for head_dim in arguments.head_dims:
            for which in ("forward", "fwd+bwd") if arguments.backward else ("forward",):
                print("\n".join(table(length, head_dim, arguments, compared, which)), flush=True)


if __name__ == "__main__":
    main()
