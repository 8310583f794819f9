"""Backward kernel: each program walks the keys its rows visited, oldest to newest (paper, equation 6).

The logits are computed again. What each row needs of the forward pass is the log2 of its final stick, kept as an
unevaluated sum: added up over thousands of tiles, plain fp32 would be off by more than bf16 rounding.

A tile's gradients of keys and values are added atomically in fp32, so their last bits may change from run to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sbeval.attention.impl.triton.hardware import cache_bytes, copies, describe, has_assembly, shared_memory_bytes
from sbeval.attention.impl.triton.launch import LOG2_E, backward_parameters, heads_at_once
from sbeval.attention.impl.triton.primitives import (
    add_in_tile,
    add_tile,
    bounded,
    first_visible,
    load_tile,
    place,
    spent_by,
    two_sum,
)


@triton.jit
def _tile(
    q, do, k_base, k_desc, k_offsets, k_stride, v_base, v_desc, v_offsets, v_stride, dk_base, dk_desc, dv_base, dv_desc,
    batch, group, block, keys, last_key, first_key, minus_newer, minus_older, dq, stick, stick_lo, older, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
    COPY: tl.constexpr, REDUCE: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Sends the gradients of a block of rows through one tile of keys."""
    k = load_tile(
        k_base, k_desc, k_offsets, batch, group, block, k_stride, keys, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, COPY
    )
    v = load_tile(
        v_base, v_desc, v_offsets, batch, group, block, v_stride, keys, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, COPY
    )
    z = bounded(tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale)
    if MASKED:
        key = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        z = tl.where((key <= last_key[:, None]) & (key >= first_key[:, None]), z, float("-inf"))
    spent = spent_by(z, EXACT)
    stick, stick_lo = two_sum(stick, stick_lo, tl.sum(spent, 1))
    took = z - spent
    weight = tl.exp2(add_in_tile(took + (stick + stick_lo)[:, None], spent, minus_newer, EXACT, ASSEMBLY))
    dv = tl.dot(tl.trans(weight.to(do.dtype)), do, input_precision="ieee")
    add_tile(dv, dv_base, dv_desc, batch, group, block, keys, HEAD_DIM, BLOCK_D, BLOCK_N, REDUCE)
    taken = weight * tl.dot(do, tl.trans(v), input_precision="ieee")
    # minus what older keys took of the row's gradient; its own part, which cancels where `took` is near 1, is exact
    past = -older[:, None] + tl.zeros_like(taken)
    past = tl.dot(taken.to(minus_older.dtype), minus_older, past, input_precision="ieee")
    dz = (taken + tl.exp2(took) * (past - taken)).to(k.dtype)
    older += tl.sum(taken, 1)
    dq = tl.dot(dz, k, dq, input_precision="ieee")
    dk = tl.dot(tl.trans(dz), q, input_precision="ieee")
    add_tile(dk, dk_base, dk_desc, batch, group, block, keys, HEAD_DIM, BLOCK_D, BLOCK_N, REDUCE)
    return dq, stick, stick_lo, older


@triton.jit
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, do_ptr, dq_ptr, dk_ptr, dv_ptr, dk_desc, dv_desc, drem_ptr, stick_ptr,
    stop_ptr, start_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l,
    heads, shared, all_heads, heads_at_once, queries, keys, qk_scale, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    ATTEND_CURRENT: tl.constexpr, STARTS: tl.constexpr, EXACT: tl.constexpr, COPY: tl.constexpr, REDUCE: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    block_m, all_head = place(tl.cdiv(queries, BLOCK_M), all_heads, heads_at_once)
    batch = all_head // heads
    head = all_head % heads
    group = head // shared
    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    row_inside = (row < queries)[:, None] & (dim < HEAD_DIM)[None, :]
    row64 = row.to(tl.int64)[:, None]
    q_offsets = batch.to(tl.int64) * q_stride_b + head.to(tl.int64) * q_stride_h + row64 * q_stride_l + dim[None, :]
    q = tl.load(q_ptr + q_offsets, mask=row_inside, other=0.0)
    do_offsets = batch.to(tl.int64) * do_stride_b + head.to(tl.int64) * do_stride_h + row64 * do_stride_l
    do = tl.load(do_ptr + do_offsets + dim[None, :], mask=row_inside, other=0.0)
    row_at = all_head.to(tl.int64) * queries + row
    # rows past the end have no stick: they give every key the weight 0
    stick = tl.load(stick_ptr + row_at * 2, mask=row < queries, other=-1e30)
    stick_lo = tl.load(stick_ptr + row_at * 2 + 1, mask=row < queries, other=0.0)
    # the remainder is one more thing the logits took from: it behaves like a key older than all others
    older = tl.load(drem_ptr + row_at, mask=row < queries, other=0.0) * tl.exp2(stick + stick_lo)

    position = keys - queries + block_m * BLOCK_M
    # rows past the end attend nothing
    last_key = tl.where(row < queries, position + tl.arange(0, BLOCK_M) - (0 if ATTEND_CURRENT else 1), -1)
    first_key = first_visible(start_ptr, batch, row, queries, STARTS)
    tile = tl.arange(0, BLOCK_N)
    minus_newer = -(tile[:, None] > tile[None, :]).to(tl.float32 if EXACT else tl.float16)
    minus_older = -(tile[:, None] < tile[None, :]).to(tl.float32 if EXACT else q_ptr.dtype.element_ty)

    group_at = batch.to(tl.int64) * (heads // shared) + group
    k_base = k_ptr + batch.to(tl.int64) * k_stride_b + group.to(tl.int64) * k_stride_h
    v_base = v_ptr + batch.to(tl.int64) * v_stride_b + group.to(tl.int64) * v_stride_h
    dk_base = dk_ptr + group_at * keys * HEAD_DIM
    dv_base = dv_ptr + group_at * keys * HEAD_DIM
    k_offsets = tile[:, None] * k_stride_l + dim[None, :]
    v_offsets = tile[:, None] * v_stride_l + dim[None, :]

    end = tl.minimum(keys, tl.minimum(position + BLOCK_M, keys) + (0 if ATTEND_CURRENT else -1))
    end_block = tl.cdiv(tl.maximum(end, 0), BLOCK_N)
    full = tl.maximum(position + (1 if ATTEND_CURRENT else 0), 0) // BLOCK_N
    # keys older than where the forward pass stopped took nothing off the stick it kept: to a row they do not exist
    stop_at = stop_ptr + all_head.to(tl.int64) * tl.cdiv(queries, 16) + tl.minimum(row, queries - 1) // 16
    first_key = tl.maximum(first_key, tl.load(stop_at))
    block = tl.min(first_key, 0) // BLOCK_N
    first_full = tl.cdiv(tl.max(first_key, 0), BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    while block < tl.minimum(first_full, end_block):
        dq, stick, stick_lo, older = _tile(
            q, do, k_base, k_desc, k_offsets, k_stride_l, v_base, v_desc, v_offsets, v_stride_l, dk_base, dk_desc,
            dv_base, dv_desc, batch, group, block, keys, last_key, first_key, minus_newer, minus_older, dq, stick,
            stick_lo, older, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT, COPY, REDUCE, ASSEMBLY,
        )  # fmt: skip
        block += 1
    for inner in tl.range(block, full, num_stages=STAGES):
        dq, stick, stick_lo, older = _tile(
            q, do, k_base, k_desc, k_offsets, k_stride_l, v_base, v_desc, v_offsets, v_stride_l, dk_base, dk_desc,
            dv_base, dv_desc, batch, group, inner, keys, last_key, first_key, minus_newer, minus_older, dq, stick,
            stick_lo, older, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_N, False, EXACT, COPY, REDUCE, ASSEMBLY,
        )  # fmt: skip
    block = tl.maximum(block, full)
    while block < end_block:
        dq, stick, stick_lo, older = _tile(
            q, do, k_base, k_desc, k_offsets, k_stride_l, v_base, v_desc, v_offsets, v_stride_l, dk_base, dk_desc,
            dv_base, dv_desc, batch, group, block, keys, last_key, first_key, minus_newer, minus_older, dq, stick,
            stick_lo, older, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT, COPY, REDUCE, ASSEMBLY,
        )  # fmt: skip
        block += 1
    tl.store(dq_ptr + q_offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=row_inside)


def backward(
    q: Tensor, k: Tensor, v: Tensor, d_output: Tensor, d_remainder: Tensor, stick: Tensor, stop: Tensor,
    scale: float, attend_current: bool, seq_start: Tensor | None, row_start: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launches the backward kernel.

    Args:
        q: [B, H, Q, D] as in the forward pass; k and v [B, G, K, D].
        k: see q.
        v: see q.
        d_output: [B, H, Q, D], last dimension contiguous.
        d_remainder: [B, H, Q] fp32, contiguous.
        stick: what the forward pass kept.
        stop: what the forward pass kept.
        scale: factor of the logits.
        attend_current: whether a query attends its own position.
        seq_start: as in the forward pass.
        row_start: as in the forward pass.

    Returns:
        Gradients of q, k and v, in their dtypes.
    """
    batch, heads, queries, head_dim = q.shape
    launch = backward_parameters(
        head_dim=head_dim,
        queries=queries,
        element_bytes=q.element_size(),
        shared_memory_bytes=shared_memory_bytes(q),
    )
    dq = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    dv = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    copy = copies(k) and copies(v)
    blocks = triton.cdiv(queries, launch.block_queries)
    # keys and values as they are, their gradients in fp32
    together = heads_at_once(
        heads=batch * heads,
        bytes_a_head=2 * k.shape[2] * head_dim * (k.element_size() + 4) * k.shape[1] // heads,
        blocks=blocks,
        cache_bytes=cache_bytes(q),
    )
    reduce = copies(dk) and copies(dv)
    starts = "row" if row_start is not None else "batch" if seq_start is not None else "none"
    tile = (launch.block_keys, launch.block_head_dim)
    _backward_kernel[(batch * heads * blocks,)](
        q, k, v, *(describe(each, *tile) if copy else each for each in (k, v)), d_output, dq, dk, dv,
        *(describe(each, *tile) if reduce else each for each in (dk, dv)), d_remainder, stick, stop,
        row_start if row_start is not None else seq_start if seq_start is not None else q,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_output.stride()[:3],
        heads, heads // k.shape[1], batch * heads, together, queries, k.shape[2], scale * LOG2_E, scale,
        HEAD_DIM=head_dim, BLOCK_D=launch.block_head_dim, BLOCK_M=launch.block_queries, BLOCK_N=launch.block_keys,
        STAGES=launch.num_stages, ATTEND_CURRENT=attend_current, STARTS=starts, EXACT=q.dtype == torch.float32,
        COPY=copy, REDUCE=reduce, ASSEMBLY=has_assembly(q), num_warps=launch.num_warps,
        maxnreg=launch.max_registers,
    )  # fmt: skip
    return dq, (dk * scale).to(k.dtype), dv.to(v.dtype)
