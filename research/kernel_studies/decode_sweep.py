"""Times launch parameters of the decode kernels against each other, to choose those in decode.py and decode_slots.py.

    python -m research.kernel_studies.decode_sweep --head-dims 64 --keys 65536 [--warps 1 2 4 8] [--block-keys 64]
    python -m research.kernel_studies.decode_sweep --slots --key-heads 16 --head-dims 32

`--slots` times those that read lengths from the device's memory, where nothing is skipped. Prints the fastest sets of
each head_dim, and what the package chooses, as a share of the bandwidth of a copy measured in the same run.
"""

import argparse
import dataclasses
import itertools
from functools import partial
from typing import Any

import torch
import triton
from decode import copy_bandwidth, inputs
from measuring import graphed, interleaved, machine

from sbeval.attention.impl.triton.decode import decode, decode_parameters
from sbeval.attention.impl.triton.decode_slots import decode_slots, slot_parameters


def main() -> None:
    """Prints one line for each of the fastest sets."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64])
    parser.add_argument("--keys", type=int, default=65536)
    parser.add_argument("--key-heads", type=int, default=64)
    parser.add_argument("--block-keys", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--warps", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--buffer-kib", type=int, nargs="+", default=[24, 48, 72], help="what the pipeline holds")
    parser.add_argument("--splits", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--joined", type=int, nargs="+", default=[32], help="splits added up at a time, with --slots")
    parser.add_argument("--slots", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("decode_sweep measures kernels on a GPU and finds none here, so it measures nothing.")
        return
    copied = copy_bandwidth()
    print(f"{machine()}; a copy moves {copied / 1e12:.3f} TB/s", flush=True)
    for head_dim in arguments.head_dims:
        torch.manual_seed(0)
        q, k, v = inputs(arguments.key_heads, 1, arguments.keys, head_dim, breaking=False)
        common = {"rows": 1, "head_dim": head_dim, "element_bytes": 2, "key_heads": arguments.key_heads}
        if arguments.slots:
            length = torch.full((1,), arguments.keys, device="cuda", dtype=torch.int32)
            call = partial(decode_slots, q, k, v, length, skipping=False)
            base: Any = slot_parameters(room=arguments.keys, multiprocessors=132, skipping=False, **common)
        else:
            call = partial(decode, q, k, v, seq_start=None, skipping=False)
            base = decode_parameters(keys=arguments.keys, multiprocessors=132, skipping=False, **common)
        call = partial(call, scale=head_dim**-0.5, attend_current=False, log2_threshold=-150.0)
        found = [(interleaved({"": graphed(call)}, milliseconds=5)[""][1], "what the package chooses")]
        for keys, warps, kib, splits, chunk, joined in itertools.product(
            *(arguments.block_keys, arguments.warps, arguments.buffer_kib, arguments.splits, arguments.chunks),
            arguments.joined,
        ):
            stages = max(2, min(8, kib * 1024 // (4 * keys * base.block_head_dim)))
            chosen = dataclasses.replace(
                base, block_keys=keys, num_warps=warps, num_stages=stages, splits=splits, first_splits=splits,
                chunk_tiles=chunk, **({"joined_splits": joined} if arguments.slots else {}),
            )  # fmt: skip
            name = f"N={keys} warps={warps} stages={stages} splits={splits} chunk={chunk} joined={joined}"
            try:
                time = interleaved({name: graphed(partial(call, parameters=chosen))}, milliseconds=5)[name][1]
            except (triton.runtime.errors.OutOfResources, RuntimeError) as error:
                print(f"D={head_dim} {name}: {type(error).__name__}", flush=True)
                continue
            found.append((time, name))
        moved = 4 * arguments.key_heads * arguments.keys * head_dim
        for time, name in (*sorted(found[1:])[:8], found[0]):
            print(f"D={head_dim} {name}: {time:.3f} ms, {moved / time * 1e3 / copied:.2f} of a copy", flush=True)


if __name__ == "__main__":
    main()
