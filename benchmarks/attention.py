"""Stick-breaking attention beside PyTorch's softmax attention: accuracy, speed and memory, in one run on one GPU.

    python benchmarks/attention.py [--lengths 16384 65536] [--head-dims 32 64 128] [--heads 16] [--backward]

Every row is measured on the same tensors; times are the 20th, 50th and 80th percentiles in milliseconds. A kernel whose
error against fp64 exceeds the limit gets no speed. The logits lie around -9, so that no stick breaks and the kernel has
to visit every key: on plain random inputs each stick is gone within some hundred keys and the kernel stops there, which
says nothing about its dense speed.
"""

import argparse
import platform
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sbeval.attention import stickbreaking_attention

ERROR_LIMIT = 8e-3


def softmax_attention(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal softmax attention through one of PyTorch's backends."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def stick_breaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This project's kernel, nothing skipped."""
    return stickbreaking_attention(q, k, v, impl="triton").output


def forward_only(attend: Callable[..., Tensor], inputs: list[Tensor]) -> Tensor:
    """Output alone."""
    with torch.no_grad():
        return attend(*inputs)


def gradients(attend: Callable[..., Tensor], inputs: list[Tensor], d_output: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    output = attend(*inputs)
    return output.detach(), *torch.autograd.grad(output, inputs, d_output)


def dense_inputs(heads: int, length: int, head_dim: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v whose logits lie around -9, and a gradient of the output."""
    q, k, v, d_output = (torch.randn(1, heads, length, head_dim, device="cuda") for _ in range(4))
    q[..., 0] = 3 * head_dim**0.25
    k[..., 0] = -3 * head_dim**0.25
    return [tensor.bfloat16() for tensor in (q, k, v)], d_output.bfloat16()


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of the exact value."""
    return float((found.double() - exact).norm() / exact.norm())


def exact_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention in fp64, by blocks of rows."""
    rows = []
    for first in range(0, q.shape[2], 1024):
        logits = q[:, :, first : first + 1024] @ k.mT * q.shape[-1] ** -0.5
        mask = torch.ones_like(logits, dtype=torch.bool).tril(first)
        rows.append(torch.softmax(logits.masked_fill(~mask, -torch.inf), -1) @ v)
    return torch.cat(rows, 2)


def errors(name: str, attend: Callable[..., Tensor], inputs: list[Tensor], d_output: Tensor) -> list[float]:
    """Errors of output, dq, dk, dv against fp64 on the first head's first 4,096 tokens."""
    part = [tensor[:, :1, :4096].contiguous() for tensor in inputs]
    d_part = d_output[:, :1, :4096].contiguous()
    found = gradients(attend, part, d_part)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return exact_softmax(q, k, v) if name != "sbeval" else stickbreaking_attention(q, k, v, impl="blockwise").output

    right = gradients(exact, [tensor.double() for tensor in part], d_part.double())
    return [relative_error(a, b) for a, b in zip(found, right, strict=True)]


def measure(call: Callable[[], Any]) -> tuple[list[float], int]:
    """20th, 50th and 80th percentile in ms, and peak bytes above what was allocated before."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    peak = torch.cuda.max_memory_allocated() - before
    return triton.testing.do_bench(call, warmup=50, rep=300, quantiles=[0.2, 0.5, 0.8]), peak


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--backward", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/attention.py measures kernels on a GPU and finds none here, so it measures nothing.")
        return
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    print(
        f"{torch.cuda.get_device_name()}, driver {driver}, torch {torch.__version__}, triton {triton.__version__}, "
        f"python {platform.python_version()}; bf16, causal, batch x heads = {arguments.heads}"
    )
    print("| L | D | kernel | error o/dq/dk/dv | pass | ms p20/p50/p80 | TFLOP/s | FA2 time / this | peak MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    kernels = {
        "flash (SDPA)": softmax_attention(SDPBackend.FLASH_ATTENTION),
        "cudnn (SDPA)": softmax_attention(SDPBackend.CUDNN_ATTENTION),
        "sbeval": stick_breaking,
    }
    for length in arguments.lengths:
        for head_dim in arguments.head_dims:
            torch.manual_seed(0)
            inputs, d_output = dense_inputs(arguments.heads, length, head_dim)
            passes = ["forward", "fwd+bwd"] if arguments.backward else ["forward"]
            flash: dict[str, float] = {}
            for name, attend in kernels.items():
                row = f"| {length} | {head_dim} | {name} | "
                error = errors(name, attend, inputs, d_output)
                row += "/".join(f"{value:.1e}" for value in error)
                for which in passes:
                    if not max(error) < ERROR_LIMIT:
                        print(f"{row} | {which} | error too large: no speed | | | |")
                        continue
                    call = partial(forward_only, attend, inputs)
                    if which == "fwd+bwd":
                        call = partial(gradients, attend, inputs, d_output)
                    times, peak = measure(call)
                    flop = (2 if which == "forward" else 7) * arguments.heads * length * length * head_dim
                    flash.setdefault(which, times[1])
                    shown = "/".join(f"{time:.2f}" for time in times)
                    print(
                        f"{row} | {which} | {shown} | {flop / times[1] / 1e9:.0f} | {flash[which] / times[1]:.2f} | "
                        f"{peak / 2**20:.0f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
