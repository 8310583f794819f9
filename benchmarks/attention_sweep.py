"""Times launch parameters of the forward and backward kernels against each other, to choose those in launch.py.

python benchmarks/attention_sweep.py --pass forward --head-dims 64 --length 16384
"""

import argparse
import dataclasses
import itertools

import torch
import triton

from sbeval.attention import stickbreaking_attention
from sbeval.attention.impl.triton import backward, forward, launch


def main() -> None:
    """Prints a line for each set of parameters, fastest first."""
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
    for head_dim in arguments.head_dims:
        torch.manual_seed(0)
        shape = (1, arguments.heads, arguments.length, head_dim)
        q, k, v, d_output = (torch.randn(shape, device="cuda").bfloat16() for _ in range(4))
        found = []
        base = launch.forward_parameters(head_dim=head_dim, queries=arguments.length, element_bytes=2)
        for queries, keys, warps, stages, chunk in itertools.product(
            arguments.block_queries, arguments.block_keys, arguments.warps, arguments.stages, arguments.chunks
        ):
            chosen = dataclasses.replace(
                base, block_queries=queries, block_keys=keys, num_warps=warps, num_stages=stages, chunk_tiles=chunk
            )
            try:
                if arguments.which == "forward":
                    forward.forward_parameters = lambda chosen=chosen, **_: chosen
                    with torch.no_grad():
                        call = lambda: stickbreaking_attention(q, k, v, impl="triton")  # noqa: E731
                        time = triton.testing.do_bench(call, warmup=20, rep=60, return_mode="median")
                else:
                    backward.backward_parameters = lambda chosen=chosen, **_: chosen
                    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
                    output = stickbreaking_attention(*inputs, impl="triton").output
                    call = lambda: torch.autograd.grad(output, inputs, d_output, retain_graph=True)  # noqa: E731
                    time = triton.testing.do_bench(call, warmup=20, rep=60, return_mode="median")
            except Exception as error:  # a shape that does not fit the GPU is a result of the sweep
                print(
                    f"D={head_dim} M={queries} N={keys} warps={warps} stages={stages} chunk={chunk}: {type(error).__name__}"
                )
                continue
            found.append((time, queries, keys, warps, stages, chunk))
        for time, queries, keys, warps, stages, chunk in sorted(found)[:6]:
            print(
                f"{arguments.which} D={head_dim} M={queries} N={keys} warps={warps} stages={stages} chunk={chunk}: {time:.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
