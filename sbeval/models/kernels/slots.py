"""Triton kernels for `SlotCache`: writing new keys and values, and softmax attention of a decode step.

The keys of a text are split over several programs, and a second kernel merges their outputs. All queries that share a
key head are rows of one tile, so that each key is read once for all of them. The lengths of the texts are read from
device memory, so a CUDA graph can replay the same launch while texts grow.

Shape suffixes: B slots, H query heads, G key/value heads, Q newest positions, K capacity of a slot in keys, D head_dim.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sbeval.attention.impl.triton.decode import MOST_SPLITS, tile_sizes
from sbeval.attention.impl.triton.hardware import multiprocessors, on_device_of, starts_early
from sbeval.attention.impl.triton.launch import LOG2_E, padded_to_tile

_FEWEST_KEYS = 64


@triton.jit(do_not_specialize=["room"])
def _write_kernel(
    new_k, new_v, k, v, position_ptr, room,
    new_k_b, new_k_h, new_k_l, new_v_b, new_v_h, new_v_l, k_b, k_h, k_l, v_b, v_h, v_l,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    # a slot smaller than the text is a ring buffer of the newest keys
    new = tl.program_id(2).to(tl.int64)
    place = (tl.load(position_ptr + batch).to(tl.int64) + new) % room
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < HEADS) & (dim < HEAD_DIM)
    key = tl.load(new_k + batch * new_k_b + head * new_k_h + new * new_k_l + dim, mask=mask)
    value = tl.load(new_v + batch * new_v_b + head * new_v_h + new * new_v_l + dim, mask=mask)
    tl.store(k + batch * k_b + head * k_h + place * k_l + dim, key, mask=mask)
    tl.store(v + batch * v_b + head * v_h + place * v_l + dim, value, mask=mask)


def kernel_write(k_BGKD: Tensor, v_BGKD: Tensor, new_k_BGQD: Tensor, new_v_BGQD: Tensor, position_B: Tensor) -> None:
    """Writes Q new keys and values into each slot, from `position_B` (integers on the device) on, modulo K.

    The last dimension of the cache is contiguous. New keys and values have the dtype of the cache.
    """
    new_k_BGQD, new_v_BGQD = (x if x.stride(-1) == 1 else x.contiguous() for x in (new_k_BGQD, new_v_BGQD))
    batch, heads, room, head_dim = k_BGKD.shape
    block_head_dim = triton.next_power_of_2(head_dim)
    block_heads = min(triton.next_power_of_2(heads), max(1, 2048 // block_head_dim))
    with on_device_of(k_BGKD):
        _write_kernel[(batch, -(-heads // block_heads), new_k_BGQD.shape[2])](
            new_k_BGQD, new_v_BGQD, k_BGKD, v_BGKD, position_B, room,
            *new_k_BGQD.stride()[:3], *new_v_BGQD.stride()[:3], *k_BGKD.stride()[:3], *v_BGKD.stride()[:3],
            HEADS=heads, HEAD_DIM=head_dim, BLOCK_H=block_heads, BLOCK_D=block_head_dim, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["groups", "shared", "queries", "splits"])
def _split_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, top_ptr, length_ptr, slope_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    groups, shared, queries, splits, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    FEWEST: tl.constexpr, EARLY: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    pair = tl.program_id(0).to(tl.int64)
    batch, group = pair // groups, pair % groups
    keys = tl.load(length_ptr + batch).to(tl.int32)
    # lengths are fixed for the whole decode step and may be read before the previous kernel ends, which writes all
    # other inputs
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    tiles = tl.cdiv(keys, BLOCK_N)
    split_tiles = tl.maximum(tl.cdiv(tiles, splits), FEWEST)
    first = split * split_tiles
    if first >= tiles:
        return
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    within = tl.arange(0, BLOCK_N)
    inside = row < shared * queries
    head, query = group * shared + row // queries, row % queries
    position = keys - queries + query
    if slope_ptr is not None:
        slope = tl.load(slope_ptr + head, mask=inside, other=0.0) * LOG2_E
    q_at = q_ptr + batch * q_stride_b + head * q_stride_h + query * q_stride_l
    q = tl.load(q_at[:, None] + dim[None, :], mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    k_base = k_ptr + batch * k_stride_b + group * k_stride_h
    v_base = v_ptr + batch * v_stride_b + group * v_stride_h
    out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for step in tl.range(0, tl.minimum(split_tiles, tiles - first), num_stages=STAGES):
        key = (first + step) * BLOCK_N + within
        at = key.to(tl.int64)[:, None]
        visible = (key < keys)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_base + at * k_stride_l + dim[None, :], mask=visible, other=0.0)
        v = tl.load(v_base + at * v_stride_l + dim[None, :], mask=visible, other=0.0)
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
        if slope_ptr is not None:
            z -= slope[:, None] * (position[:, None] - key[None, :])
        z = tl.where(key[None, :] <= position[:, None], z, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        # a split may contain no key that is visible to a query
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(z - base[:, None])
        kept = tl.exp2(top - base)
        total = total * kept + tl.sum(weight, 1)
        out = tl.dot(weight.to(v.dtype), v, out * kept[:, None], input_precision="ieee")
        top = higher
    partial_offset = (pair * splits + split) * ROWS + row
    tl.store(partial_ptr + partial_offset[:, None] * HEAD_DIM + dim[None, :],
             out / tl.where(total == 0.0, 1.0, total)[:, None],
             mask=inside[:, None] & (dim < HEAD_DIM)[None, :])  # fmt: skip
    tl.store(top_ptr + partial_offset, top + tl.log2(total), mask=inside)


@triton.jit(do_not_specialize=["groups", "shared", "queries", "splits"])
def _join_kernel(
    partial_ptr, top_ptr, out_ptr, length_ptr, sink_ptr,
    out_stride_b, out_stride_h, out_stride_l, groups, shared, queries, splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr, FEWEST: tl.constexpr, EARLY: tl.constexpr, LOG2_E: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    row_index = tl.program_id(1)
    batch, group = pair // groups, pair % groups
    tiles = tl.cdiv(tl.load(length_ptr + batch).to(tl.int32), BLOCK_N)
    # lengths are fixed for the whole decode step and may be read before the previous kernel ends, which writes all
    # other inputs
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    used = tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, splits), FEWEST))
    dim = tl.arange(0, BLOCK_D)
    first = pair * splits * ROWS + row_index
    every = tl.arange(0, SPLITS)
    highest = tl.max(tl.load(top_ptr + first + every * ROWS, mask=every < used, other=float("-inf")), 0)
    out = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    for start in range(0, used, TOGETHER):
        at = start + tl.arange(0, TOGETHER)
        share = tl.exp2(tl.load(top_ptr + first + at * ROWS, mask=at < used, other=float("-inf")) - highest)
        part = tl.load(partial_ptr + (first + at * ROWS)[:, None] * HEAD_DIM + dim[None, :],
                       mask=(at < used)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)  # fmt: skip
        out += tl.sum(share[:, None] * part, 0)
        total += tl.sum(share, 0)
    head = group * shared + row_index // queries
    if sink_ptr is not None:
        total += tl.exp2(tl.load(sink_ptr + head).to(tl.float32) * LOG2_E - highest)
    out_at = out_ptr + batch * out_stride_b + head * out_stride_h + row_index % queries * out_stride_l
    tl.store(out_at + dim, (out / total).to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


def kernel_softmax_decode(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    length_B: Tensor,
    scale: float,
    *,
    sink_H: Tensor | None = None,
    slope_H: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """Computes softmax attention of a decode step over the keys in each slot.

    Args:
        q_BHQD: queries of the newest positions in fp16, bf16 or fp32; H / G * Q is at most 64. The last dimension of
            q, k and v is contiguous.
        k_BGKD: keys of the slots.
        v_BGKD: values of the slots.
        length_B: number of valid keys in each slot, integers on the device, at least Q; no key beyond is read.
        scale: factor of the logits.
        sink_H: attention sink, a logit for each head that takes part in the softmax and has no value; contiguous.
        slope_H: ALiBi's slopes in fp32, contiguous; None without ALiBi.
        splits: number of programs that share the keys of a head; None chooses it.

    Returns:
        [B, H, Q, D] in q's dtype.
    """
    batch, heads, queries, head_dim = q_BHQD.shape
    groups, room = k_BGKD.shape[1], k_BGKD.shape[2]
    shared = heads // groups
    block_head_dim, row_bytes, block_keys = tile_sizes(head_dim, q_BHQD.element_size())
    fewest = max(1, _FEWEST_KEYS // block_keys)
    if splits is None:
        wanted = -(-12 * multiprocessors(q_BHQD) // (batch * groups))
        splits = max(1, min(wanted, MOST_SPLITS, -(-room // block_keys) // fewest))
    rows = padded_to_tile(shared * queries)
    out = torch.empty((batch, queries, heads, head_dim), dtype=q_BHQD.dtype, device=q_BHQD.device).transpose(1, 2)
    part = torch.empty((batch * groups, splits, rows, head_dim), dtype=torch.float32, device=q_BHQD.device)
    top = torch.empty((batch * groups, splits, rows), dtype=torch.float32, device=q_BHQD.device)
    early = starts_early(q_BHQD)
    options = {"launch_pdl": True} if early else {}
    with on_device_of(q_BHQD):
        _split_kernel[(batch * groups, splits)](
            q_BHQD, k_BGKD, v_BGKD, part, top, length_B, slope_H,
            *q_BHQD.stride()[:3], *k_BGKD.stride()[:3], *v_BGKD.stride()[:3],
            groups, shared, queries, splits, scale * LOG2_E,
            HEAD_DIM=head_dim, BLOCK_D=block_head_dim, ROWS=rows, BLOCK_N=block_keys, FEWEST=fewest,
            STAGES=max(2, min(6, 48 * 1024 // (2 * block_keys * row_bytes))), EARLY=early, LOG2_E=LOG2_E,
            num_warps=4, **options,
        )  # fmt: skip
        _join_kernel[(batch * groups, shared * queries)](
            part, top, out, length_B, sink_H, *out.stride()[:3], groups, shared, queries, splits,
            HEAD_DIM=head_dim, BLOCK_D=block_head_dim, ROWS=rows, BLOCK_N=block_keys, SPLITS=MOST_SPLITS,
            TOGETHER=min(32, triton.next_power_of_2(splits)), FEWEST=fewest, EARLY=early, LOG2_E=LOG2_E,
            num_warps=4, **options,
        )  # fmt: skip
    return out
