"""Backward kernel: each program visits the keys that its rows saw, oldest to newest (paper, equation 6).

The logits are computed again. For each row (query) the forward pass stored the stick (the weight that newer keys leave)
that reaches one tile. The stick at the next newer tile is the stored one divided by the share that the newer tile
leaves, and so on. The order is oldest to newest, because the gradient that older keys contribute must be a sum of few
numbers, not a small difference of large ones. A stick below fp32's range could not be divided; tiles that are reached
by less than 2^-100 of the stick count as having no weight.

Gradients of keys and values are added atomically in fp32, so their last bits may change from run to run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sbeval.attention.impl.triton.hardware import cache_bytes, copies, describe, has_assembly, shared_memory_bytes
from sbeval.attention.impl.triton.launch import LOG2_E, backward_parameters, backward_programs_together, heads_at_once
from sbeval.attention.impl.triton.primitives import add_tile, first_visible, last_visible, load_tiles, place
from sbeval.attention.impl.triton.sticks import (
    before_groups,
    in_columns,
    in_groups,
    keys_of_columns,
    of_threads,
    reciprocal,
    share_between_threads,
    sums_of_older,
    take_one_by_one,
)


@triton.jit
def tile_weights(z, block, stick, saved, saved_block, M: tl.constexpr, N: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Computes the weights of the tile `block`, from logits `z` [M, N] times log2 e in column order.

    `stick` is the stick at the next older tile. `saved` is the stick that the forward pass stored for each row, and
    `saved_block` the tile that it reaches, [M, 2, 2] each.

    Returns:
        The share that each key takes of the stick that reaches it, as four tensors (`in_groups`); the weights, also as
        four tensors; and the stick that reaches this tile.
    """
    left, s0, s1, s2, s3, w0, w1, w2, w3 = take_one_by_one(tl.exp2(z), M, N, ASSEMBLY)
    newer, all_left = share_between_threads(left, (w0 + w1) + (w2 + w3), M, N // 16)
    # a tile that leaves nothing of the stick is the stored one or older, so there is no division by 0
    reaches = tl.where(block == saved_block, saved, 0.0)
    stick = tl.where(block > saved_block, stick * reciprocal(all_left, ASSEMBLY), reaches)
    before = before_groups(left, (stick * newer).reshape(M, 4), M, N // 16)
    return s0, s1, s2, s3, w0 * before, w1 * before, w2 * before, w3 * before, stick


@triton.jit
def logit_gradients(s0, s1, s2, s3, w0, w1, w2, w3, d_weight, older, M: tl.constexpr, N: tl.constexpr):
    """Returns the gradient [M, N] of a tile's logits, and `older` with this tile added.

    `s0` to `s3` are the shares that keys take of the stick that reaches them, `w0` to `w3` their weights, `d_weight`
    [M, N] the weights' gradient in column order, and `older` [M, 2, 2] the sum of weight times gradient over all older
    keys and the remainder.
    """
    g0, g1, g2, g3 = in_groups(d_weight, M, N)
    t0, t1, t2, t3 = w0 * g0, w1 * g1, w2 * g2, w3 * g3
    older0, older1, older2, older3, older = sums_of_older(t0, t1, t2, t3, older, M, N)
    # dz = t - s * (t + older): a larger logit gives its own key more weight, and takes the share s from this key and
    # all older keys
    dz = in_columns(
        t0 - s0 * (t0 + older0), t1 - s1 * (t1 + older1), t2 - s2 * (t2 + older2), t3 - s3 * (t3 + older3), M, N
    )
    return dz, older


@triton.jit
def _over_rows(x, rows, BLOCK_D: tl.constexpr):
    """Returns the matmul of x transposed [N, M] with rows [M, BLOCK_D], as [N, BLOCK_D]."""
    if BLOCK_D >= 64 and x.dtype.primitive_bitwidth == 16:
        # computed as (rows^T x)^T: as the right factor, x is read by the tensor cores from shared memory; as the left
        # factor it would be loaded into registers first. The result has BLOCK_D rows, and tensor cores take 64 at a
        # time
        product = tl.trans(tl.dot(tl.trans(rows), x, input_precision="ieee"))
    else:
        product = tl.dot(tl.trans(x), rows, input_precision="ieee")
    return product


@triton.jit
def _tile(
    q, do, k_base, k_desc, k_offsets, k_stride, v_base, v_desc, v_offsets, v_stride, dk_base, dk_desc, dv_base, dv_desc,
    batch, group, block, keys, last_key, first_key, dq, stick, saved, saved_block, older, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    COPY: tl.constexpr, REDUCE: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one tile: adds them to dk, dv and dq, and updates the stick and the sum `older`."""
    k, v = load_tiles(
        k_base, k_desc, k_offsets, k_stride, v_base, v_desc, v_offsets, v_stride, batch, group, block, keys,
        HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, COPY,
    )  # fmt: skip
    z = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
    if MASKED:
        key = block * BLOCK_N + keys_of_columns(BLOCK_N)[None, :]
        z = tl.where((key <= last_key[:, None]) & (key >= first_key[:, None]), z, float("-inf"))
    s0, s1, s2, s3, w0, w1, w2, w3, stick = tile_weights(
        z, block, stick, saved, saved_block, BLOCK_M, BLOCK_N, ASSEMBLY
    )
    weight = in_columns(w0, w1, w2, w3, BLOCK_M, BLOCK_N).to(do.dtype)
    dv = _over_rows(weight, do, BLOCK_D)
    add_tile(dv, dv_base, dv_desc, batch, group, block, keys, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, REDUCE)
    d_weight = tl.dot(do, tl.trans(v), input_precision="ieee")
    dz, older = logit_gradients(s0, s1, s2, s3, w0, w1, w2, w3, d_weight, older, BLOCK_M, BLOCK_N)
    dz = dz.to(k.dtype)
    dk = _over_rows(dz, q, BLOCK_D)
    dq = tl.dot(dz, k, dq, input_precision="ieee")
    add_tile(dk, dk_base, dk_desc, batch, group, block, keys, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, REDUCE)
    return dq, stick, older


@triton.jit
def _backward_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, do_ptr, dq_ptr, dk_ptr, dv_ptr, dk_desc, dv_desc, drem_ptr, rem_ptr, stick_ptr,
    stop_ptr, start_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l,
    heads, shared, all_heads, heads_at_once, queries, keys, qk_scale, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    ATTEND_CURRENT: tl.constexpr, STARTS: tl.constexpr, COPY: tl.constexpr, REDUCE: tl.constexpr,
    ASSEMBLY: tl.constexpr, CAUSAL: tl.constexpr,
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
    saved = of_threads(tl.load(stick_ptr + row_at * 2, mask=row < queries, other=0.0), BLOCK_M)
    saved_block = of_threads(tl.load(stick_ptr + row_at * 2 + 1, mask=row < queries, other=0.0), BLOCK_M).to(tl.int32)
    stick = tl.zeros([BLOCK_M, 2, 2], tl.float32)
    # for the gradient, the remainder behaves like a key that is older than all others
    remainder = tl.load(rem_ptr + row_at, mask=row < queries, other=0.0)
    older = of_threads(tl.load(drem_ptr + row_at, mask=row < queries, other=0.0) * remainder, BLOCK_M)

    last_key, end_block, full = last_visible(
        start_ptr, block_m * BLOCK_M, queries, keys, BLOCK_M, BLOCK_N, ATTEND_CURRENT, STARTS, CAUSAL
    )
    first_key = first_visible(start_ptr, batch, row, queries, STARTS)
    tile = keys_of_columns(BLOCK_N)
    group_at = batch.to(tl.int64) * (heads // shared) + group
    k_base = k_ptr + batch.to(tl.int64) * k_stride_b + group.to(tl.int64) * k_stride_h
    v_base = v_ptr + batch.to(tl.int64) * v_stride_b + group.to(tl.int64) * v_stride_h
    dk_base = dk_ptr + group_at * keys * HEAD_DIM
    dv_base = dv_ptr + group_at * keys * HEAD_DIM
    k_offsets = tile[:, None] * k_stride_l + dim[None, :]
    v_offsets = tile[:, None] * v_stride_l + dim[None, :]

    # the forward pass did not visit keys older than this, so they took nothing off the stored stick: skip them
    stop_at = stop_ptr + all_head.to(tl.int64) * tl.cdiv(queries, 16) + tl.minimum(row, queries - 1) // 16
    first_key = tl.maximum(first_key, tl.load(stop_at))
    block = tl.min(first_key, 0) // BLOCK_N
    first_full = tl.cdiv(tl.max(first_key, 0), BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    while block < tl.minimum(first_full, end_block):
        dq, stick, older = _tile(
            q, do, k_base, k_desc, k_offsets, k_stride_l, v_base, v_desc, v_offsets, v_stride_l, dk_base, dk_desc,
            dv_base, dv_desc, batch, group, block, keys, last_key, first_key, dq, stick, saved,
            saved_block, older, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, True, COPY, REDUCE, ASSEMBLY,
        )  # fmt: skip
        block += 1
    for inner in tl.range(block, full, num_stages=STAGES):
        dq, stick, older = _tile(
            q, do, k_base, k_desc, k_offsets, k_stride_l, v_base, v_desc, v_offsets, v_stride_l, dk_base, dk_desc,
            dv_base, dv_desc, batch, group, inner, keys, last_key, first_key, dq, stick, saved,
            saved_block, older, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, False, COPY, REDUCE, ASSEMBLY,
        )  # fmt: skip
    block = tl.maximum(block, full)
    while block < end_block:
        dq, stick, older = _tile(
            q, do, k_base, k_desc, k_offsets, k_stride_l, v_base, v_desc, v_offsets, v_stride_l, dk_base, dk_desc,
            dv_base, dv_desc, batch, group, block, keys, last_key, first_key, dq, stick, saved,
            saved_block, older, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, True, COPY, REDUCE, ASSEMBLY,
        )  # fmt: skip
        block += 1
    tl.store(dq_ptr + q_offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=row_inside)


def backward(
    q: Tensor, k: Tensor, v: Tensor, d_output: Tensor, d_remainder: Tensor, remainder: Tensor, stick: Tensor,
    stop: Tensor, scale: float, attend_current: bool, seq_start: Tensor | None, row_start: Tensor | None,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launches the backward kernel; returns the gradients of q, k and v in their dtypes.

    Takes the inputs and the results of `forward`. `d_output` is [B, H, Q, D] with a contiguous last dimension,
    `d_remainder` [B, H, Q] fp32 and contiguous.
    """
    batch, heads, queries, head_dim = q.shape
    launch = backward_parameters(
        head_dim=head_dim, queries=queries, element_bytes=q.element_size(), shared_memory_bytes=shared_memory_bytes(q)
    )
    dq = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    dv = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
    copy = copies(k) and copies(v)
    blocks = -(-queries // launch.block_queries)
    # bytes of keys and values in their dtype, plus 4 for each number of their gradients
    together = heads_at_once(
        heads=batch * heads,
        bytes_a_head=2 * k.shape[2] * head_dim * (k.element_size() + 4) * k.shape[1] // heads,
        blocks=blocks,
        cache_bytes=cache_bytes(q),
        programs=backward_programs_together(num_warps=launch.num_warps, cache_bytes=cache_bytes(q)),
    )
    reduce = copies(dk) and copies(dv)
    starts = "row" if row_start is not None else "batch" if seq_start is not None else "none"
    tile = (launch.block_keys, launch.block_head_dim)
    _backward_kernel[(batch * heads * blocks,)](
        q, k, v, *(describe(each, *tile) if copy else each for each in (k, v)), d_output, dq, dk, dv,
        *(describe(each, *tile) if reduce else each for each in (dk, dv)), d_remainder, remainder, stick, stop,
        row_start if row_start is not None else seq_start if seq_start is not None else q,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_output.stride()[:3],
        heads, heads // k.shape[1], batch * heads, together, queries, k.shape[2], scale * LOG2_E, scale,
        HEAD_DIM=head_dim, BLOCK_D=launch.block_head_dim, BLOCK_M=launch.block_queries, BLOCK_N=launch.block_keys,
        STAGES=launch.num_stages, ATTEND_CURRENT=attend_current, STARTS=starts,
        COPY=copy, REDUCE=reduce, ASSEMBLY=has_assembly(q), CAUSAL=causal, num_warps=launch.num_warps,
        maxnreg=launch.max_registers,
    )  # fmt: skip
    # one pass scales and rounds dk, which may be gigabytes
    return dq, torch.mul(dk, scale, out=torch.empty(k.shape, dtype=k.dtype, device=k.device)), dv.to(v.dtype)
