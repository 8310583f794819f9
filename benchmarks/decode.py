"""Decode: one or a few queries against a long cache, as a share of a copy's bandwidth, and PyTorch's attention.

    python benchmarks/decode.py [--keys 4096 16384 65536 262144] [--head-dims 32 64 128] [--key-heads 64] [--rows 1 8]

Bytes are those of the keys and values, read once. A copy's bandwidth (bytes read and written) is measured in the same
run. Calls are replayed as CUDA graphs, as a server decodes. The logits lie around -9, so that no stick breaks and every
key is read; the last rows of each shape have sticks that break within some hundred keys. A kernel gets a speed
only where its error against fp64 is at most twice that of PyTorch's attention, both on the first two key heads.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from measuring import graphed, interleaved, machine, relative_error, shown
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sbeval.attention import stickbreaking_attention, stickbreaking_decode

THRESHOLD = 1e-5
COPIED_BYTES = 2**30


def softmax_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's FlashAttention: one query sees all keys; rows of a group are queries without a mask."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def stick_breaking(q: Tensor, k: Tensor, v: Tensor, *, skip_threshold: float | None = None) -> Tensor:
    """This project's kernels; rows are heads that share a key head."""
    batch, groups, rows, head_dim = q.shape
    heads = q.reshape(batch, groups * rows, 1, head_dim)
    found = stickbreaking_attention(heads, k, v, impl="triton", skip_threshold=skip_threshold).output
    return found.view(q.shape)


def in_slots(q: Tensor, k: Tensor, v: Tensor, *, skip_threshold: float | None = None) -> Tensor:
    """The kernels that read a text's length from the device's memory, as a step of generation runs them."""
    batch, groups, rows, head_dim = q.shape
    heads = q.reshape(batch, groups * rows, 1, head_dim)
    length = torch.full((batch,), k.shape[2], device=q.device, dtype=torch.int32)
    found = stickbreaking_decode(
        heads, k, v, length, scale=head_dim**-0.5, attend_current=False, skip_threshold=skip_threshold, impl="triton"
    )
    return found.output.view(q.shape)


def exact_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In fp64."""
    return torch.softmax(q.double() @ k.double().mT * q.shape[-1] ** -0.5, -1) @ v.double()


def exact_stick_breaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In fp64, one query at a time."""
    rows = [
        stickbreaking_attention(q[:, :, row : row + 1].double(), k.double(), v.double(), impl="reference").output
        for row in range(q.shape[2])
    ]
    return torch.cat(rows, 2)


def inputs(key_heads: int, rows: int, keys: int, head_dim: int, *, breaking: bool) -> list[Tensor]:
    """Queries [1, key_heads, rows, D], keys and values [1, key_heads, keys, D] in bf16."""
    made = [
        torch.randn(1, key_heads, length, head_dim, device="cuda", dtype=torch.bfloat16)
        for length in (rows, keys, keys)
    ]
    if not breaking:
        made[0][..., 0] = 3 * head_dim**0.25
        made[1][..., 0] = -3 * head_dim**0.25
    return made


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy."""
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / interleaved({"copy": lambda: target.copy_(source)})["copy"][1] * 1e3


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, nargs="+", default=[4096, 16384, 65536, 262144])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--key-heads", type=int, default=64, help="batch times key/value heads")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="query heads that share a key head")
    parser.add_argument("--milliseconds", type=float, default=60.0, help="how long each call is timed")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/decode.py measures kernels on a GPU and finds none here, so it measures nothing.")
        return
    torch.manual_seed(0)
    copied = copy_bandwidth()
    print(f"{machine()}\n\nbf16, batch x key heads = {arguments.key_heads}; a copy moves {copied / 1e12:.3f} TB/s\n")
    print("| keys | D | rows | kernel | error | ms p20/p50/p80 | TB/s | share of copy |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for keys in arguments.keys:
        for head_dim in arguments.head_dims:
            for rows in arguments.rows:
                for line in lines(keys, head_dim, rows, arguments.key_heads, copied, arguments.milliseconds):
                    print(line, flush=True)


def lines(keys: int, head_dim: int, rows: int, key_heads: int, copied: float, milliseconds: float) -> list[str]:
    """Rows of the table for one shape."""
    dense = inputs(key_heads, rows, keys, head_dim, breaking=False)
    few = [tensor[:, :2].contiguous() for tensor in dense]
    broken = inputs(key_heads, rows, keys, head_dim, breaking=True)
    few_broken = [tensor[:, :2].contiguous() for tensor in broken]
    skip: Callable[..., Tensor] = partial(stick_breaking, skip_threshold=THRESHOLD)
    skip_in_slots: Callable[..., Tensor] = partial(in_slots, skip_threshold=THRESHOLD)
    cases = {
        "flash (SDPA)": (softmax_attention, exact_softmax, dense, few),
        "sbeval": (stick_breaking, exact_stick_breaking, dense, few),
        "sbeval, lengths on the GPU": (in_slots, exact_stick_breaking, dense, few),
        f"sbeval, sticks spent, skip {THRESHOLD:g}": (skip, exact_stick_breaking, broken, few_broken),
        f"sbeval, lengths on the GPU, sticks spent, skip {THRESHOLD:g}": (
            skip_in_slots,
            exact_stick_breaking,
            broken,
            few_broken,
        ),
    }
    errors = {name: relative_error(run(*part), exact(*part)) for name, (run, exact, _, part) in cases.items()}
    limit = 2 * errors["flash (SDPA)"] + torch.finfo(torch.bfloat16).eps / 4
    right = [name for name in cases if errors[name] <= limit]
    times = interleaved(
        {name: graphed(partial(cases[name][0], *cases[name][2])) for name in right}, milliseconds=milliseconds
    )
    size = 2 * key_heads * keys * head_dim * 2
    found = []
    for name in cases:
        row = f"| {keys} | {head_dim} | {rows} | {name} | {errors[name]:.1e} | "
        if name not in right:
            found.append(row + f"over {limit:.1e}: no speed | | |")
            continue
        speed = size / times[name][1] * 1e3
        found.append(row + f"{shown(times[name])} | {speed / 1e12:.2f} | {speed / copied:.2f} |")
    return found


if __name__ == "__main__":
    main()
