"""Times launch parameters of the forward and backward kernels against each other, to choose those in launch.py.

python -m research.kernel_studies.attention_sweep --pass forward --head-dims 64 --length 16384
"""

import argparse
import dataclasses
import itertools
from functools import partial
from typing import Any

import torch
import triton
from attention_kernels import dense_inputs, forward_only, stick_breaking
from torch import Tensor

from sbeval.attention.impl.triton import backward, forward, launch


def main() -> None:
    """Prints the fastest sets of parameters for each head_dim."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pass", dest="which", choices=["forward", "backward"], default="forward")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64])
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--block-queries", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--block-keys", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--chunks", type=int, nargs="+", default=[8])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("attention_sweep measures kernels on a GPU and finds none here, so it measures nothing.")
        return
    for head_dim in arguments.head_dims:
        torch.manual_seed(0)
        inputs, d_output = dense_inputs(arguments.heads, arguments.length, head_dim)
        base = launch.forward_parameters(head_dim=head_dim, queries=arguments.length, element_bytes=2)
        found = []
        for queries, keys, warps, stages, chunk in itertools.product(
            arguments.block_queries, arguments.block_keys, arguments.warps, arguments.stages, arguments.chunks
        ):
            chosen = dataclasses.replace(
                base, block_queries=queries, block_keys=keys, num_warps=warps, num_stages=stages, chunk_tiles=chunk
            )
            name = f"M={queries} N={keys} warps={warps} stages={stages} chunk={chunk}"
            try:
                found.append((timed(arguments.which, chosen, inputs, d_output), name))
            except Exception as error:  # parameters that do not fit the GPU are a result of the sweep
                print(f"{arguments.which} D={head_dim} {name}: {type(error).__name__}")
        for time, name in sorted(found)[:6]:
            print(f"{arguments.which} D={head_dim} {name}: {time:.2f} ms", flush=True)


def timed(which: str, chosen: launch.LaunchParameters, inputs: list[Tensor], d_output: Tensor) -> float:
    """Median milliseconds of one pass with these parameters."""

    def parameters(**_: Any) -> launch.LaunchParameters:
        return chosen

    if which == "forward":
        forward.forward_parameters = parameters  # type: ignore[attr-defined]
        call = partial(forward_only, stick_breaking, inputs)
    else:
        backward.backward_parameters = parameters  # type: ignore[attr-defined]
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        call = partial(torch.autograd.grad, stick_breaking(*leaves), leaves, d_output, retain_graph=True)
    return float(triton.testing.do_bench(call, warmup=20, rep=60, return_mode="median"))


if __name__ == "__main__":
    main()
