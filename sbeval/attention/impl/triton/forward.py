"""Forward kernel: each program walks the keys newest to oldest for one block of queries of one head.

Names in the kernel: `stick` is the log2 of what is left of each row's stick, `_lo` what its rounding dropped.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sbeval.attention.impl.triton.launch import forward_parameters
from sbeval.attention.impl.triton.primitives import bounded, spent_by, take_off_newer, two_sum


@triton.jit
def _tile(
    q, k_base, v_base, k_stride, v_stride, block, keys, row_limit, row_first, minus_newer, out, stick, stick_lo,
    qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to a block of rows."""
    key = block * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    k_at = k_base + key.to(tl.int64)[:, None] * k_stride + dim[None, :]
    v_at = v_base + key.to(tl.int64)[:, None] * v_stride + dim[None, :]
    if MASKED:
        inside = (key < keys)[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(k_at, mask=inside, other=0.0)
        v = tl.load(v_at, mask=inside, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        k = tl.load(k_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    z = bounded(tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale)
    if MASKED:
        z = tl.where((key[None, :] <= row_limit[:, None]) & (key[None, :] >= row_first[:, None]), z, float("-inf"))
    spent = spent_by(z, EXACT)
    weight = tl.exp2(take_off_newer((z - spent) + stick[:, None], spent, minus_newer, EXACT))
    out = tl.dot(weight.to(v.dtype), v, out, input_precision="ieee")
    stick, stick_lo = two_sum(stick, stick_lo, -tl.sum(spent, 1))
    return out, stick, stick_lo


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, rem_ptr, stick_ptr, stop_ptr, start_ptr, row_start_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    heads, shared, queries, keys, qk_scale, log2_threshold, stop_entries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, ATTEND_CURRENT: tl.constexpr, PADDED: tl.constexpr,
    PACKED: tl.constexpr, EXACT: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    # long rows first: they are the last blocks of queries
    block_m = tl.num_programs(1) - 1 - tl.program_id(1)
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    row_inside = (row < queries)[:, None] & (dim < HEAD_DIM)[None, :]
    q_offsets = batch * q_stride_b + head * q_stride_h + row.to(tl.int64)[:, None] * q_stride_l + dim[None, :]
    q = tl.load(q_ptr + q_offsets, mask=row_inside, other=0.0)
    k_base = k_ptr + batch * k_stride_b + (head // shared) * k_stride_h
    v_base = v_ptr + batch * v_stride_b + (head // shared) * v_stride_h

    position = keys - queries + block_m * BLOCK_M
    # rows past the end attend nothing
    row_limit = tl.where(row < queries, position + tl.arange(0, BLOCK_M) - (0 if ATTEND_CURRENT else 1), -1)
    # the first key of each row, of the row that looks farthest back, and of the one that looks back least
    if PACKED:
        row_first = tl.load(row_start_ptr + row, mask=row < queries, other=0)
        oldest_first = tl.load(row_start_ptr + block_m * BLOCK_M)
        newest_first = tl.load(row_start_ptr + tl.minimum(block_m * BLOCK_M + BLOCK_M, queries) - 1)
    else:
        oldest_first = tl.load(start_ptr + batch).to(tl.int32) if PADDED else 0
        newest_first = oldest_first
        row_first = tl.zeros([1], tl.int32) + oldest_first
    dtype = tl.float32 if EXACT else tl.float16
    tile = tl.arange(0, BLOCK_N)
    minus_newer = -(tile[:, None] > tile[None, :]).to(dtype)

    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    stick = tl.zeros([BLOCK_M], tl.float32)
    stick_lo = tl.zeros([BLOCK_M], tl.float32)

    # keys up to `last` are seen by some row, blocks below `full` by every row
    last = tl.minimum(keys, tl.minimum(position + BLOCK_M, keys) + (0 if ATTEND_CURRENT else -1))
    full = tl.maximum(position + (1 if ATTEND_CURRENT else 0), 0) // BLOCK_N
    first_block = oldest_first // BLOCK_N
    first_full = tl.cdiv(newest_first, BLOCK_N)
    block = tl.cdiv(tl.maximum(last, 0), BLOCK_N)
    while (block > first_block) & (block > full):
        block -= 1
        out, stick, stick_lo = _tile(
            q, k_base, v_base, k_stride_l, v_stride_l, block, keys, row_limit, row_first, minus_newer, out, stick,
            stick_lo, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT,
        )  # fmt: skip
    open_rows = tl.where((row < queries) & (row_first < block * BLOCK_N), stick, float("-inf"))
    going = tl.max(open_rows, 0) >= log2_threshold
    while going & (block > first_full):
        steps = tl.minimum(block - first_full, CHUNK)
        for step in tl.range(0, steps, num_stages=STAGES):
            out, stick, stick_lo = _tile(
                q, k_base, v_base, k_stride_l, v_stride_l, block - 1 - step, keys, row_limit, row_first, minus_newer,
                out, stick, stick_lo, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_N, False, EXACT,
            )  # fmt: skip
        block -= steps
        open_rows = tl.where((row < queries) & (row_first < block * BLOCK_N), stick, float("-inf"))
        going = tl.max(open_rows, 0) >= log2_threshold
    if PADDED or PACKED:
        while going & (block > first_block):
            block -= 1
            out, stick, stick_lo = _tile(
                q, k_base, v_base, k_stride_l, v_stride_l, block, keys, row_limit, row_first, minus_newer, out, stick,
                stick_lo, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT,
            )  # fmt: skip

    tl.store(out_ptr + q_offsets, out.to(out_ptr.dtype.element_ty), mask=row_inside)
    row_at = tl.program_id(0).to(tl.int64) * queries + row
    tl.store(rem_ptr + row_at, tl.exp2(stick + stick_lo), mask=row < queries)
    if SAVE:
        tl.store(stick_ptr + row_at * 2, stick, mask=row < queries)
        tl.store(stick_ptr + row_at * 2 + 1, stick_lo, mask=row < queries)
        # one entry for 16 rows, so that the backward pass may choose blocks of its own
        entry = block_m * (BLOCK_M // 16) + tl.arange(0, BLOCK_M // 16)
        stop_at = stop_ptr + tl.program_id(0).to(tl.int64) * stop_entries + entry
        tl.store(stop_at, tl.zeros([BLOCK_M // 16], tl.int32) + block * BLOCK_N, mask=entry < stop_entries)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, attend_current: bool, seq_start: Tensor | None,
    row_start: Tensor | None, log2_threshold: float, save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launches the forward kernel.

    Args:
        q: [B, H, Q, D], last dimension contiguous; k and v [B, G, K, D] likewise.
        k: see q.
        v: see q.
        scale: factor of the logits.
        attend_current: whether a query attends its own position.
        seq_start: [B] first real position, or None.
        row_start: int32 [Q] first key of each row where sequences are packed, rising, or None. Not beside seq_start.
        log2_threshold: log2 of the stick below which older keys are not visited.
        save: keep what the backward pass needs.

    Returns:
        output like q; remainder [B, H, Q] fp32; stick [B, H, Q, 2] fp32, log2 of the remainder as an unevaluated sum;
        stop [B, H, ceil(Q / 16)] int32, the oldest key that each 16 rows visited. The last two are empty unless `save`.
    """
    batch, heads, queries, head_dim = q.shape
    launch = forward_parameters(head_dim=head_dim, queries=queries, element_bytes=q.element_size())
    blocks = triton.cdiv(queries, launch.block_queries)
    out = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    remainder = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    stick = torch.empty((batch, heads, queries, 2) if save else (0,), dtype=torch.float32, device=q.device)
    stop_entries = triton.cdiv(queries, 16)
    stop = torch.empty((batch, heads, stop_entries) if save else (0,), dtype=torch.int32, device=q.device)
    _forward_kernel[(batch * heads, blocks)](
        q, k, v, out, remainder, stick, stop, q if seq_start is None else seq_start,
        q if row_start is None else row_start,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        heads, heads // k.shape[1], queries, k.shape[2], scale * 1.4426950408889634, log2_threshold,
        stop_entries,
        HEAD_DIM=head_dim, BLOCK_D=launch.block_head_dim, BLOCK_M=launch.block_queries, BLOCK_N=launch.block_keys,
        CHUNK=launch.chunk_tiles, STAGES=launch.num_stages, ATTEND_CURRENT=attend_current,
        PADDED=seq_start is not None, PACKED=row_start is not None, EXACT=q.dtype == torch.float32, SAVE=save,
        num_warps=launch.num_warps,
    )  # fmt: skip
    return out, remainder, stick, stop
