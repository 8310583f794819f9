"""Backward kernel: each program walks the keys its rows visited, oldest to newest (paper, equation 6).

The logits are computed again. What each row needs of the forward pass is the log2 of its final stick, kept as an
unevaluated sum: added up over thousands of tiles, plain fp32 would be off by more than bf16 rounding.

A tile's gradients of keys and values are added atomically in fp32, so their last bits may change from run to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sbeval.attention.impl.triton.launch import backward_parameters
from sbeval.attention.impl.triton.primitives import bounded, spent_by, take_off_newer, two_sum


@triton.jit
def _tile(
    q, do, k_base, v_base, dk_base, dv_base, k_stride, v_stride, block, keys, row_limit, row_first, minus_newer,
    is_older, dq, stick, stick_lo, older, qk_scale, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Sends the gradients of a block of rows through one tile of keys."""
    key = block * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    key64 = key.to(tl.int64)[:, None]
    k_at = k_base + key64 * k_stride + dim[None, :]
    v_at = v_base + key64 * v_stride + dim[None, :]
    inside = (key < keys)[:, None] & (dim < HEAD_DIM)[None, :]
    if MASKED or HEAD_DIM < BLOCK_D:
        k = tl.load(k_at, mask=inside, other=0.0)
        v = tl.load(v_at, mask=inside, other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    z = bounded(tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale)
    if MASKED:
        z = tl.where((key[None, :] <= row_limit[:, None]) & (key[None, :] >= row_first[:, None]), z, float("-inf"))
    spent = spent_by(z, EXACT)
    stick, stick_lo = two_sum(stick, stick_lo, tl.sum(spent, 1))
    weight = tl.exp2(take_off_newer((z - spent) + (stick + stick_lo)[:, None], spent, minus_newer, EXACT))
    taken = weight * tl.dot(do, tl.trans(v), input_precision="ieee")
    older_here = older[:, None] + tl.zeros_like(taken)
    older_here = tl.dot(taken.to(is_older.dtype), is_older, older_here, input_precision="ieee")
    left = tl.exp2(spent * -1.0)
    took = tl.exp2(z - spent) if EXACT else 1.0 - left
    dz = (taken * left - took * older_here).to(k.dtype)
    older += tl.sum(taken, 1)
    dv = tl.dot(tl.trans(weight.to(do.dtype)), do, input_precision="ieee")
    grad_at = key64 * HEAD_DIM + dim[None, :]
    tl.atomic_add(dv_base + grad_at, dv, mask=inside, sem="relaxed")
    dq = tl.dot(dz, k, dq, input_precision="ieee")
    dk = tl.dot(tl.trans(dz), q, input_precision="ieee") * scale
    tl.atomic_add(dk_base + grad_at, dk, mask=inside, sem="relaxed")
    return dq, stick, stick_lo, older


@triton.jit
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, drem_ptr, stick_ptr, stop_ptr, start_ptr,
    row_start_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l,
    heads, shared, queries, keys, qk_scale, scale, stop_entries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ATTEND_CURRENT: tl.constexpr, PADDED: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    block_m = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    group = head // shared
    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    row_inside = (row < queries)[:, None] & (dim < HEAD_DIM)[None, :]
    row64 = row.to(tl.int64)[:, None]
    q_offsets = batch * q_stride_b + head * q_stride_h + row64 * q_stride_l + dim[None, :]
    q = tl.load(q_ptr + q_offsets, mask=row_inside, other=0.0)
    do_offsets = batch * do_stride_b + head * do_stride_h + row64 * do_stride_l + dim[None, :]
    do = tl.load(do_ptr + do_offsets, mask=row_inside, other=0.0)
    row_at = tl.program_id(0).to(tl.int64) * queries + row
    # rows past the end have no stick: they give every key the weight 0
    stick = tl.load(stick_ptr + row_at * 2, mask=row < queries, other=-1e30)
    stick_lo = tl.load(stick_ptr + row_at * 2 + 1, mask=row < queries, other=0.0)
    # the remainder is one more thing the logits took from: it behaves like a key older than all others
    older = tl.load(drem_ptr + row_at, mask=row < queries, other=0.0) * tl.exp2(stick + stick_lo)

    position = keys - queries + block_m * BLOCK_M
    # rows past the end attend nothing
    row_limit = tl.where(row < queries, position + tl.arange(0, BLOCK_M) - (0 if ATTEND_CURRENT else 1), -1)
    # the first key of each row, and of the row that looks back least
    if PACKED:
        row_first = tl.load(row_start_ptr + row, mask=row < queries, other=0)
        newest_first = tl.load(row_start_ptr + tl.minimum(block_m * BLOCK_M + BLOCK_M, queries) - 1)
    else:
        newest_first = tl.load(start_ptr + batch).to(tl.int32) if PADDED else 0
        row_first = tl.zeros([1], tl.int32) + newest_first
    last = tl.minimum(keys, tl.minimum(position + BLOCK_M, keys) + (0 if ATTEND_CURRENT else -1))
    entry = block_m * (BLOCK_M // 16) + tl.arange(0, BLOCK_M // 16)
    stop_at = stop_ptr + tl.program_id(0).to(tl.int64) * stop_entries + entry
    first_block = tl.min(tl.load(stop_at, mask=entry < stop_entries, other=2147483647), 0) // BLOCK_N
    tile = tl.arange(0, BLOCK_N)
    minus_newer = -(tile[:, None] > tile[None, :]).to(tl.float32 if EXACT else tl.float16)
    grad_dtype = tl.float32 if EXACT else q_ptr.dtype.element_ty
    is_older = (tile[:, None] < tile[None, :]).to(grad_dtype)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    k_base = k_ptr + batch * k_stride_b + group * k_stride_h
    v_base = v_ptr + batch * v_stride_b + group * v_stride_h
    grad_base = (batch * (heads // shared) + group) * keys * HEAD_DIM
    full = tl.maximum(position + (1 if ATTEND_CURRENT else 0), 0) // BLOCK_N
    end = tl.cdiv(tl.maximum(last, 0), BLOCK_N)
    block = first_block
    first_full = tl.cdiv(newest_first, BLOCK_N) if PADDED or PACKED else 0
    while block < tl.minimum(first_full, end):
        dq, stick, stick_lo, older = _tile(
            q, do, k_base, v_base, dk_ptr + grad_base, dv_ptr + grad_base, k_stride_l, v_stride_l, block, keys,
            row_limit, row_first, minus_newer, is_older, dq, stick, stick_lo, older, qk_scale, scale,
            HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT,
        )  # fmt: skip
        block += 1
    for inner in tl.range(block, full):
        dq, stick, stick_lo, older = _tile(
            q, do, k_base, v_base, dk_ptr + grad_base, dv_ptr + grad_base, k_stride_l, v_stride_l, inner, keys,
            row_limit, row_first, minus_newer, is_older, dq, stick, stick_lo, older, qk_scale, scale,
            HEAD_DIM, BLOCK_D, BLOCK_N, False, EXACT,
        )  # fmt: skip
    block = tl.maximum(block, full)
    while block < end:
        dq, stick, stick_lo, older = _tile(
            q, do, k_base, v_base, dk_ptr + grad_base, dv_ptr + grad_base, k_stride_l, v_stride_l, block, keys,
            row_limit, row_first, minus_newer, is_older, dq, stick, stick_lo, older, qk_scale, scale,
            HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT,
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
        seq_start: [B] first real position, or None.
        row_start: int32 [Q] first key of each row where sequences are packed, rising, or None.

    Returns:
        Gradients of q, k and v, in their dtypes.
    """
    batch, heads, queries, head_dim = q.shape
    launch = backward_parameters(head_dim=head_dim, queries=queries, element_bytes=q.element_size())
    dq = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    dv = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    _backward_kernel[(batch * heads, triton.cdiv(queries, launch.block_queries))](
        q, k, v, d_output, dq, dk, dv, d_remainder, stick, stop, q if seq_start is None else seq_start,
        q if row_start is None else row_start,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_output.stride()[:3],
        heads, heads // k.shape[1], queries, k.shape[2], scale * 1.4426950408889634, scale, stop.shape[2],
        HEAD_DIM=head_dim, BLOCK_D=launch.block_head_dim, BLOCK_M=launch.block_queries, BLOCK_N=launch.block_keys,
        ATTEND_CURRENT=attend_current, PADDED=seq_start is not None, PACKED=row_start is not None,
        EXACT=q.dtype == torch.float32, num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    return dq, dk.to(k.dtype), dv.to(v.dtype)
