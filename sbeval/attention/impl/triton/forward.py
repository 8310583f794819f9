"""Forward kernel: each program visits the keys newest to oldest for one block of queries of one head.

A row is one query; its stick is the weight that newer keys leave for older ones, and starts at 1. For the backward pass
each row stores the oldest tile that is reached by a stick of at least FLOOR, and that stick. The backward pass computes
the sticks at newer tiles by division; the weights of older tiles are negligible.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sbeval.attention.impl.triton.hardware import cache_bytes, copies, describe, has_assembly, shared_memory_bytes
from sbeval.attention.impl.triton.launch import LOG2_E, forward_parameters, heads_at_once, training_block_keys
from sbeval.attention.impl.triton.primitives import first_visible, last_visible, load_tiles, place
from sbeval.attention.impl.triton.sticks import (
    LARGEST_PRODUCT,
    before_groups,
    in_columns,
    keys_of_columns,
    of_rows,
    share_between_threads,
    take_in_eights,
    take_one_by_one,
)

FEWEST_PAIRS_TO_COPY = 2**26
"""Query-key pairs above which tiles are loaded by the copy engine (TMA).

Making the two descriptors takes the host about 30 us, as long as the kernel runs on 16 heads of 2,048 tokens.
"""

FLOOR: tl.constexpr = tl.constexpr(2.0**-100)
SMALLEST: tl.constexpr = tl.constexpr(2.0**-126)


@triton.jit
def _tile(
    q, k_base, k_desc, k_offsets, k_stride, v_base, v_desc, v_offsets, v_stride, batch, group, block, keys,
    last_key, first_key, out, stick, largest, saved, saved_block, qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, ONE_BY_ONE: tl.constexpr, COPY: tl.constexpr, ASSEMBLY: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Adds the output of one tile of keys to a block of rows, and takes the tile's share off their sticks."""
    k, v = load_tiles(
        k_base, k_desc, k_offsets, k_stride, v_base, v_desc, v_offsets, v_stride, batch, group, block, keys,
        HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, COPY,
    )  # fmt: skip
    z = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
    if MASKED:
        key = block * BLOCK_N + keys_of_columns(BLOCK_N)[None, :]
        z = tl.where((key <= last_key[:, None]) & (key >= first_key[:, None]), z, float("-inf"))
    if SAVE:
        reached = stick >= FLOOR
        if MASKED:
            # for a row, the backward pass need not visit tiles of which the row sees no key
            reached &= (first_key < (block + 1) * BLOCK_N)[:, None, None]
        saved = tl.where(reached, stick, saved)
        saved_block = tl.where(reached, block, saved_block)
    e = tl.exp2(z)
    if ONE_BY_ONE:
        left, _, _, _, _, w0, w1, w2, w3 = take_one_by_one(e, BLOCK_M, BLOCK_N, ASSEMBLY)
        newer, all_left = share_between_threads(left, (w0 + w1) + (w2 + w3), BLOCK_M, BLOCK_N // 16)
        before = before_groups(left, (stick * newer).reshape(BLOCK_M, 4), BLOCK_M, BLOCK_N // 16)
        weight = in_columns(w0 * before, w1 * before, w2 * before, w3 * before, BLOCK_M, BLOCK_N)
        stick *= all_left
    else:
        weight, stick, largest = take_in_eights(e, stick, largest, BLOCK_M, BLOCK_N, ASSEMBLY)
    out = tl.dot(weight.to(v.dtype), v, out, input_precision="ieee")
    return out, stick, largest, saved, saved_block


@triton.jit
def _largest_stick(stick, newer, inside, first_key, oldest):
    """Returns the largest stick, times `newer`, of the rows that see keys older than `oldest`; -1 if no row does."""
    return tl.max(tl.where(inside & (first_key < oldest), of_rows(stick) * newer, -1.0), 0)


@triton.jit
def _next_chunk(chunk, steps, before, left, threshold, CHUNK: tl.constexpr):
    """Returns the number of tiles until the next check of the sticks.

    It is half the tiles that would spend the sticks if they saved falling as in the last `steps` tiles, and at most
    twice the last number: the first tiles predict little. A check empties the software pipeline.
    """
    log2_left = tl.log2(tl.maximum(left, SMALLEST))
    # rounding can make an untouched stick grow
    fallen = tl.maximum(tl.log2(tl.maximum(before, SMALLEST)) - log2_left, 2.0**-20)
    ahead = 0.5 * steps.to(tl.float32) * (log2_left - tl.log2(threshold)) / fallen
    return tl.maximum(tl.minimum(ahead, tl.minimum(2 * chunk, CHUNK).to(tl.float32)).to(tl.int32), 2)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, k_desc, v_desc, out_ptr, rem_ptr, stick_ptr, stop_ptr, start_ptr, newer_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    heads, shared, all_heads, heads_at_once, queries, keys, qk_scale, threshold, stop_entries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, ATTEND_CURRENT: tl.constexpr, STARTS: tl.constexpr,
    EXACT: tl.constexpr, COPY: tl.constexpr, ASSEMBLY: tl.constexpr, SAVE: tl.constexpr,
    CAUSAL: tl.constexpr, NEWER: tl.constexpr,
):  # fmt: skip
    block_m, all_head = place(tl.cdiv(queries, BLOCK_M), all_heads, heads_at_once)
    batch = all_head // heads
    head = all_head % heads
    group = head // shared
    row = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    row_inside = (row < queries)[:, None] & (dim < HEAD_DIM)[None, :]
    q_offsets = batch.to(tl.int64) * q_stride_b + head.to(tl.int64) * q_stride_h
    q_offsets += row.to(tl.int64)[:, None] * q_stride_l + dim[None, :]
    q = tl.load(q_ptr + q_offsets, mask=row_inside, other=0.0)
    tile = keys_of_columns(BLOCK_N)
    k_base = k_ptr + batch.to(tl.int64) * k_stride_b + group.to(tl.int64) * k_stride_h
    v_base = v_ptr + batch.to(tl.int64) * v_stride_b + group.to(tl.int64) * v_stride_h
    k_offsets = tile[:, None] * k_stride_l + dim[None, :]
    v_offsets = tile[:, None] * v_stride_l + dim[None, :]

    last_key, end_block, full = last_visible(
        start_ptr, block_m * BLOCK_M, queries, keys, BLOCK_M, BLOCK_N, ATTEND_CURRENT, STARTS, CAUSAL
    )
    first_key = first_visible(start_ptr, batch, row, queries, STARTS)

    newer = 1.0
    if NEWER:
        newer = tl.load(newer_ptr + all_head.to(tl.int64) * queries + row, mask=row < queries, other=0.0)
    # at least one row sees the blocks up to `end_block`; every row sees those from `first_full` to `full`
    if STARTS == "none":
        first_block = 0
        first_full = 0
    else:
        first_block = tl.min(first_key, 0) // BLOCK_N
        first_full = tl.cdiv(tl.max(first_key, 0), BLOCK_N)

    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    stick = tl.full([BLOCK_M, 2, 2], 1.0, tl.float32)
    largest = tl.zeros([BLOCK_M, 4], tl.float32)
    saved = tl.zeros([BLOCK_M, 2, 2], tl.float32)
    saved_block = tl.full([BLOCK_M, 2, 2], -1, tl.int32)
    block = end_block
    while (block > first_block) & (block > full):
        block -= 1
        out, stick, largest, saved, saved_block = _tile(
            q, k_base, k_desc, k_offsets, k_stride_l, v_base, v_desc, v_offsets, v_stride_l, batch, group, block, keys,
            last_key, first_key, out, stick, largest, saved, saved_block, qk_scale,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, True, EXACT, COPY, ASSEMBLY, SAVE,
        )  # fmt: skip
    left = _largest_stick(stick, newer, row < queries, first_key, block * BLOCK_N)
    chunk = 2
    while (left >= threshold) & (block > first_full):
        steps = tl.minimum(block - first_full, chunk)
        for step in tl.range(0, steps, num_stages=STAGES):
            out, stick, largest, saved, saved_block = _tile(
                q, k_base, k_desc, k_offsets, k_stride_l, v_base, v_desc, v_offsets, v_stride_l, batch, group,
                block - 1 - step, keys, last_key, first_key, out, stick, largest, saved, saved_block, qk_scale,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, False, EXACT, COPY, ASSEMBLY, SAVE,
            )  # fmt: skip
        block -= steps
        before = left
        left = _largest_stick(stick, newer, row < queries, first_key, block * BLOCK_N)
        chunk = _next_chunk(chunk, steps, before, left, threshold, CHUNK)
    if STARTS != "none":
        while (left >= threshold) & (block > first_block):
            block -= 1
            out, stick, largest, saved, saved_block = _tile(
                q, k_base, k_desc, k_offsets, k_stride_l, v_base, v_desc, v_offsets, v_stride_l, batch, group, block,
                keys, last_key, first_key, out, stick, largest, saved, saved_block, qk_scale,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, True, EXACT, COPY, ASSEMBLY, SAVE,
            )  # fmt: skip
            left = _largest_stick(stick, newer, row < queries, first_key, block * BLOCK_N)
    # if eight adjacent logits (base 2) add up to more than 126, the product of their exponentials overflows. Infinity
    # times a factor of 0 is NaN, which the maximum drops but the stick shows. In both cases the block visits its keys
    # again, one by one
    lost = tl.max(tl.max(tl.max((stick != stick).to(tl.int32), 2), 1), 0) > 0
    broken = False if EXACT else (tl.max(tl.max(largest, 1), 0) > LARGEST_PRODUCT) | lost
    if broken:
        out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        stick = tl.full([BLOCK_M, 2, 2], 1.0, tl.float32)
        saved = tl.zeros([BLOCK_M, 2, 2], tl.float32)
        saved_block = tl.full([BLOCK_M, 2, 2], -1, tl.int32)
        block = end_block
        going = block > first_block
        while going:
            block -= 1
            out, stick, largest, saved, saved_block = _tile(
                q, k_base, k_desc, k_offsets, k_stride_l, v_base, v_desc, v_offsets, v_stride_l, batch, group,
                block, keys, last_key, first_key, out, stick, largest, saved, saved_block, qk_scale,
                HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, True, True, COPY, ASSEMBLY, SAVE,
            )  # fmt: skip
            left = _largest_stick(stick, newer, row < queries, first_key, block * BLOCK_N)
            going = (block > first_block) & (left >= threshold)

    tl.store(out_ptr + q_offsets, out.to(out_ptr.dtype.element_ty), mask=row_inside)
    row_at = all_head.to(tl.int64) * queries + row
    remainder = of_rows(stick)
    # below the smallest normal number the loop over keys may have ended early, so such a remainder counts as 0
    tl.store(rem_ptr + row_at, tl.where(remainder < SMALLEST, 0.0, remainder), mask=row < queries)
    if SAVE:
        tl.store(stick_ptr + row_at * 2, of_rows(saved), mask=row < queries)
        tl.store(stick_ptr + row_at * 2 + 1, of_rows(saved_block).to(tl.float32), mask=row < queries)
        # for every 16 rows, so that the backward pass can use row blocks of another size
        entry = block_m * (BLOCK_M // 16) + tl.arange(0, BLOCK_M // 16)
        stop_at = stop_ptr + all_head.to(tl.int64) * stop_entries + entry
        tl.store(stop_at, tl.zeros_like(entry) + block * BLOCK_N, mask=entry < stop_entries)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, attend_current: bool, seq_start: Tensor | None,
    row_start: Tensor | None, threshold: float, save: bool, causal: bool = True,
    newer_remainder: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launches the forward kernel on q [B, H, Q, D] and k and v [B, G, K, D], whose last dimensions are contiguous.

    Args:
        q: queries.
        k: keys.
        v: values.
        scale: factor of the logits.
        attend_current: whether a query attends to its own position.
        seq_start: [B] integers, the first key that each sequence's rows may see, or None.
        row_start: [Q] non-decreasing integers, the first key that each row may see; with `causal=False` [2, Q], the
            first key and one past the last; or None.
        threshold: keys are not visited once the stick is below it; 0 visits every key.
        save: whether to store `stick` and `stop`, which the backward pass needs.
        causal: whether queries are the last positions of the keys; else every key is older than every query.
        newer_remainder: contiguous fp32 [B, H, Q], the product of the remainders of calls on newer keys, or None.

    Returns:
        output like q; remainder [B, H, Q] fp32; stick [B, H, Q, 2] fp32, for each row a stick and the index of the tile
        (of `training_block_keys` keys) that it reaches; stop [B, H, ceil(Q / 16)] int32, the oldest key that each 16
        rows visited. The last two are empty unless `save`.
    """
    batch, heads, queries, head_dim = q.shape
    sizes = {"head_dim": head_dim, "element_bytes": q.element_size()}
    launch = forward_parameters(
        **sizes,
        queries=queries,
        training_block_keys=training_block_keys(**sizes, shared_memory_bytes=shared_memory_bytes(q)) if save else None,
    )
    blocks = -(-queries // launch.block_queries)  # triton.cdiv takes some microseconds on the host
    out = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    remainder = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    stick = torch.empty((batch, heads, queries, 2) if save else (0,), dtype=torch.float32, device=q.device)
    stop_entries = -(-queries // 16)
    stop = torch.empty((batch, heads, stop_entries) if save else (0,), dtype=torch.int32, device=q.device)
    pairs = batch * heads * queries * (k.shape[2] - (queries // 2 if causal else 0))
    copy = launch.copy_engine and pairs >= FEWEST_PAIRS_TO_COPY and copies(k) and copies(v)
    together = heads_at_once(
        heads=batch * heads,
        bytes_a_head=2 * k.shape[2] * head_dim * k.element_size() * k.shape[1] // heads,
        blocks=blocks,
        cache_bytes=cache_bytes(q),
    )
    starts = "row" if row_start is not None else "batch" if seq_start is not None else "none"
    _forward_kernel[(batch * heads * blocks,)](
        q, k, v, *(describe(each, launch.block_keys, launch.block_head_dim) if copy else each for each in (k, v)),
        out, remainder, stick, stop,
        row_start if row_start is not None else seq_start if seq_start is not None else q,
        q if newer_remainder is None else newer_remainder,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        heads, heads // k.shape[1], batch * heads, together, queries, k.shape[2], scale * LOG2_E, threshold,
        stop_entries,
        HEAD_DIM=head_dim, BLOCK_D=launch.block_head_dim, BLOCK_M=launch.block_queries, BLOCK_N=launch.block_keys,
        CHUNK=launch.chunk_tiles, STAGES=launch.num_stages, ATTEND_CURRENT=attend_current, STARTS=starts,
        EXACT=q.dtype == torch.float32, COPY=copy, ASSEMBLY=has_assembly(q), SAVE=save,
        CAUSAL=causal, NEWER=newer_remainder is not None,
        num_warps=launch.num_warps, maxnreg=launch.max_registers,
    )  # fmt: skip
    return out, remainder, stick, stop
