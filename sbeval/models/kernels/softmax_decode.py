"""Softmax attention of the newest positions of texts in slots, over as many keys as each holds.

The keys of a text are split over programs, the last of which joins what all of them found. Lengths are read from the
device's memory and nothing is read back, so that a CUDA graph replays the same launch while texts grow.

Shape suffixes: B slots, H query heads, G key/value heads, Q newest positions, K room for keys, D head_dim.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sbeval.attention.impl.triton.hardware import multiprocessors, starts_early
from sbeval.attention.impl.triton.primitives import fetch_ahead

MOST_SPLITS = 128
_FEWEST_KEYS = 64
_JOINED_NUMBERS = 4096
_LOG2_E = 1.4426950408889634


@triton.jit
def _join(
    parts, tops, out_at, used, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, JOINED: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Writes what the splits of a key head make together; others wrote it, so it is read past the first-level cache."""
    row = tl.arange(0, JOINED)
    dim = tl.arange(0, BLOCK_D)
    inside = row < rows
    out = tl.zeros([JOINED, BLOCK_D], tl.float32)
    top = tl.full([JOINED], float("-inf"), tl.float32)
    total = tl.zeros([JOINED], tl.float32)
    for start in range(0, used, TOGETHER):
        at = start + tl.arange(0, TOGETHER)
        row_at = at[:, None] * ROWS + row[None, :]
        there = (at < used)[:, None] & inside[None, :]
        own = tl.load(tops + row_at, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            parts + row_at[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=there[:, :, None] & (dim < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(own, 0))
        # a split may hold no key that a row sees
        base = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(own - base[None, :])
        kept = tl.exp2(top - base)
        out = out * kept[:, None] + tl.sum(share[:, :, None] * part, 0)
        total = total * kept + tl.sum(share, 0)
        top = higher
    out /= tl.where(inside, total, 1.0)[:, None]
    tl.store(out_at, out.to(out_at.dtype.element_ty), mask=inside[:, None] & (dim < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["groups", "shared", "queries", "splits"])
def _split_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, top_ptr, arrived_ptr, out_ptr, length_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    out_stride_b, out_stride_h, out_stride_l, groups, shared, queries, splits, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    FEWEST: tl.constexpr, JOINED: tl.constexpr, TOGETHER: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    pair = tl.program_id(0).to(tl.int64)
    batch, group = pair // groups, pair % groups
    k_base = k_ptr + batch * k_stride_b + group * k_stride_h
    v_base = v_ptr + batch * v_stride_b + group * v_stride_h
    # lengths are those of the whole step; the newest keys and queries are what the kernel before leaves
    keys = tl.load(length_ptr + batch).to(tl.int32)
    tiles = tl.cdiv(keys, BLOCK_N)
    split_tiles = tl.maximum(tl.cdiv(tiles, splits), FEWEST)
    first = split * split_tiles
    if EARLY:
        if first < tiles:
            ahead = tl.minimum(first * BLOCK_N + tl.arange(0, BLOCK_N), keys - 1).to(tl.int64)
            fetch_ahead(k_base + ahead * k_stride_l)
            fetch_ahead(v_base + ahead * v_stride_l)
        gdc_wait()
        gdc_launch_dependents()
    if first >= tiles:
        return
    rows = shared * queries
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    within = tl.arange(0, BLOCK_N)
    inside = row < rows
    head, query = group * shared + row // queries, row % queries
    q_at = q_ptr + batch * q_stride_b + head * q_stride_h + query * q_stride_l
    q = tl.load(q_at[:, None] + dim[None, :], mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    newest = keys - queries + query
    out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for step in tl.range(0, tl.minimum(split_tiles, tiles - first), num_stages=STAGES):
        key = (first + step) * BLOCK_N + within
        at = key.to(tl.int64)[:, None]
        seen = (key < keys)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_base + at * k_stride_l + dim[None, :], mask=seen, other=0.0)
        v = tl.load(v_base + at * v_stride_l + dim[None, :], mask=seen, other=0.0)
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
        z = tl.where(key[None, :] <= newest[:, None], z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(z - base[:, None])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weight, 1)
        out = tl.dot(weight.to(v.dtype), v, out * kept[:, None], input_precision="ieee")
        top = higher
    parts = part_ptr + pair * splits * ROWS * HEAD_DIM
    tops = top_ptr + pair * splits * ROWS
    at = split * ROWS + row
    tl.store(parts + at[:, None] * HEAD_DIM + dim[None, :], out / tl.where(total == 0.0, 1.0, total)[:, None],
             mask=inside[:, None] & (dim < HEAD_DIM)[None, :])  # fmt: skip
    tl.store(tops + at, top + tl.log2(total), mask=inside)
    # every thread has written before one of them says so
    tl.debug_barrier()
    used = tl.cdiv(tiles, split_tiles)
    if tl.atomic_add(arrived_ptr + pair, 1, sem="acq_rel") == used - 1:
        tl.store(arrived_ptr + pair, 0)
        each = tl.arange(0, JOINED)
        out_head = group * shared + each // queries
        out_at = out_ptr + batch * out_stride_b + out_head * out_stride_h + each % queries * out_stride_l
        _join(parts, tops, out_at[:, None] + dim[None, :], used, rows, HEAD_DIM, BLOCK_D, ROWS, JOINED, TOGETHER)


def kernel_softmax_decode(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, length_B: Tensor, scale: float, *,
    arrived_BG: Tensor | None = None, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Returns [B, H, Q, D] of each slot's newest positions, in q's dtype.

    Args:
        q_BHQD: queries in fp16, bf16 or fp32, last dimension contiguous; H / G * Q is at most 64.
        k_BGKD: room for keys, last dimension contiguous; what lies beyond a slot's length is not read.
        v_BGKD: like k.
        length_B: integers on the device, at least Q: how many keys each slot holds.
        scale: factor of the logits.
        arrived_BG: int32 zeros, in which programs count and which they leave at zero; None makes new ones.
        splits: how many programs may share the keys of a key head; None chooses.
    """
    batch, heads, queries, head_dim = q_BHQD.shape
    groups, room = k_BGKD.shape[1], k_BGKD.shape[2]
    shared = heads // groups
    block_head_dim = max(16, triton.next_power_of_2(head_dim))
    row_bytes = block_head_dim * q_BHQD.element_size()
    block_keys = 64 if row_bytes <= 256 and q_BHQD.element_size() == 2 else 32
    fewest = max(1, _FEWEST_KEYS // block_keys)
    if splits is None:
        wanted = -(-12 * multiprocessors(q_BHQD) // (batch * groups))
        splits = max(1, min(wanted, MOST_SPLITS, -(-room // block_keys) // fewest))
    joined = triton.next_power_of_2(shared * queries)
    rows = max(16, joined)
    if arrived_BG is None:
        arrived_BG = torch.zeros((batch, groups), dtype=torch.int32, device=q_BHQD.device)
    out = torch.empty((batch, queries, heads, head_dim), dtype=q_BHQD.dtype, device=q_BHQD.device).transpose(1, 2)
    part = torch.empty((batch * groups, splits, rows, head_dim), dtype=torch.float32, device=q_BHQD.device)
    top = torch.empty((batch * groups, splits, rows), dtype=torch.float32, device=q_BHQD.device)
    early = starts_early(q_BHQD)
    with torch.cuda.device(q_BHQD.device) if q_BHQD.is_cuda else contextlib.nullcontext():
        _split_kernel[(batch * groups, splits)](
            q_BHQD, k_BGKD, v_BGKD, part, top, arrived_BG, out, length_B,
            *q_BHQD.stride()[:3], *k_BGKD.stride()[:3], *v_BGKD.stride()[:3], *out.stride()[:3],
            groups, shared, queries, splits, scale * _LOG2_E,
            HEAD_DIM=head_dim, BLOCK_D=block_head_dim, ROWS=rows, BLOCK_N=block_keys, FEWEST=fewest,
            STAGES=max(2, min(6, 48 * 1024 // (2 * block_keys * row_bytes))),
            JOINED=joined, TOGETHER=max(1, min(32, _JOINED_NUMBERS // (joined * block_head_dim))), EARLY=early,
            num_warps=4, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out
