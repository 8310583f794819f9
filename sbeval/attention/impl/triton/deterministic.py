"""The backward pass without atomic additions: its results have the same bits in every run.

Keys are visited in stripes of 32 blocks, oldest first. For each stripe, one kernel with a program for each block of
rows computes dq, and stores the state that every row has before each block of keys. From these states, a second kernel
with a program for each block of keys sums dk and dv over the rows. Only one stripe's states are stored, so memory is
O(L). This backward pass is slower than the kernel with atomic additions: the logits of every tile are computed twice.

A row's state before a block of keys is the stick (the weight that newer keys leave) that reaches the next older block,
and the sum of weight times gradient over all older keys and the remainder.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sbeval.attention.impl.triton.backward import logit_gradients, tile_weights
from sbeval.attention.impl.triton.hardware import has_assembly, shared_memory_bytes
from sbeval.attention.impl.triton.launch import LOG2_E, padded_to_tile, training_block_keys
from sbeval.attention.impl.triton.primitives import first_visible, last_visible
from sbeval.attention.impl.triton.sticks import in_columns, keys_of_columns, of_rows, of_threads

STRIPE_BLOCKS = 32


@triton.jit
def _rows(pointer, row, rows, stride, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads rows [BLOCK, BLOCK_D] of a matrix with `rows` rows; 0 outside."""
    dim = tl.arange(0, BLOCK_D)
    at = pointer + row.to(tl.int64)[:, None] * stride + dim[None, :]
    return tl.load(at, mask=(row < rows)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _visible_keys(
    start_ptr, stop_ptr, program, batch, first_row, queries, keys, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STARTS: tl.constexpr, ATTEND_CURRENT: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Returns the first and last key that the forward pass visited for each row. Rows past the end see none."""
    row = first_row + tl.arange(0, ROWS)
    inside = tl.minimum(row, queries - 1)
    first_key = first_visible(start_ptr, batch, row, queries, STARTS)
    stop = tl.load(stop_ptr + program.to(tl.int64) * tl.cdiv(queries, 16) + inside // 16)
    last_key, _, _ = last_visible(start_ptr, first_row, queries, keys, ROWS, KEYS, ATTEND_CURRENT, STARTS, CAUSAL)
    return tl.maximum(first_key, stop), last_key


@triton.jit
def _logits(q, k, key, first_key, last_key, qk_scale):
    z = tl.dot(q, tl.trans(k), input_precision="ieee") * qk_scale
    return tl.where((key[None, :] <= last_key[:, None]) & (key[None, :] >= first_key[:, None]), z, float("-inf"))


@triton.jit
def _saved(stick_ptr, row_at, inside, ROWS: tl.constexpr):
    """Loads the stick that the forward pass stored for each row, and the tile that it reaches."""
    saved = of_threads(tl.load(stick_ptr + row_at * 2, mask=inside, other=0.0), ROWS)
    return saved, of_threads(tl.load(stick_ptr + row_at * 2 + 1, mask=inside, other=0.0), ROWS).to(tl.int32)


@triton.jit
def _rows_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, stick_ptr, row_state_ptr, state_ptr, stop_ptr, start_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l, heads, shared, queries, keys, qk_scale, stripe,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STRIPE: tl.constexpr,
    STARTS: tl.constexpr, ATTEND_CURRENT: tl.constexpr, ASSEMBLY: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Adds one stripe to dq for one block of rows, oldest key first, and stores the rows' states."""
    program = tl.program_id(0)
    batch = (program // heads).to(tl.int64)
    head = (program % heads).to(tl.int64)
    first_row = tl.program_id(1) * ROWS
    row = first_row + tl.arange(0, ROWS)
    first_key, last_key = _visible_keys(
        start_ptr, stop_ptr, program, batch, first_row, queries, keys, ROWS, KEYS, STARTS, ATTEND_CURRENT, CAUSAL
    )
    first = tl.maximum(tl.min(first_key, 0) // KEYS, stripe)
    end = tl.minimum(tl.max(last_key, 0) // KEYS + 1, stripe + STRIPE)
    if first < end:
        q = _rows(q_ptr + batch * q_stride_b + head * q_stride_h, row, queries, q_stride_l, HEAD_DIM, BLOCK_D)
        do = _rows(do_ptr + batch * do_stride_b + head * do_stride_h, row, queries, do_stride_l, HEAD_DIM, BLOCK_D)
        k_base = k_ptr + batch * k_stride_b + head // shared * k_stride_h
        v_base = v_ptr + batch * v_stride_b + head // shared * v_stride_h
        row_at = program.to(tl.int64) * queries + row
        inside = row < queries
        saved, saved_block = _saved(stick_ptr, row_at, inside, ROWS)
        stick = of_threads(tl.load(row_state_ptr + row_at * 2, mask=inside, other=0.0), ROWS)
        older = of_threads(tl.load(row_state_ptr + row_at * 2 + 1, mask=inside, other=0.0), ROWS)
        dim = tl.arange(0, BLOCK_D)
        dq_at = dq_ptr + row_at[:, None] * HEAD_DIM + dim[None, :]
        dq_inside = inside[:, None] & (dim < HEAD_DIM)[None, :]
        dq = tl.load(dq_at, mask=dq_inside, other=0.0)
        for block in range(first, end):
            key = block * KEYS + keys_of_columns(KEYS)
            k = _rows(k_base, key, keys, k_stride_l, HEAD_DIM, BLOCK_D)
            v = _rows(v_base, key, keys, v_stride_l, HEAD_DIM, BLOCK_D)
            state_at = state_ptr + ((program.to(tl.int64) * STRIPE + block - stripe) * queries + row) * 2
            tl.store(state_at, of_rows(stick), mask=inside)
            tl.store(state_at + 1, of_rows(older), mask=inside)
            z = _logits(q, k, key, first_key, last_key, qk_scale)
            s0, s1, s2, s3, w0, w1, w2, w3, stick = tile_weights(
                z, block, stick, saved, saved_block, ROWS, KEYS, ASSEMBLY
            )
            d_weight = tl.dot(do, tl.trans(v), input_precision="ieee")
            dz, older = logit_gradients(s0, s1, s2, s3, w0, w1, w2, w3, d_weight, older, ROWS, KEYS)
            dq = tl.dot(dz.to(k.dtype), k, dq, input_precision="ieee")
        tl.store(row_state_ptr + row_at * 2, of_rows(stick), mask=inside)
        tl.store(row_state_ptr + row_at * 2 + 1, of_rows(older), mask=inside)
        tl.store(dq_at, dq, mask=dq_inside)


@triton.jit
def _keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, stick_ptr, state_ptr, stop_ptr, start_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    do_stride_b, do_stride_h, do_stride_l, heads, shared, queries, keys, qk_scale, scale, stripe,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STRIPE: tl.constexpr,
    STARTS: tl.constexpr, ATTEND_CURRENT: tl.constexpr, ASSEMBLY: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of one block of keys: sums over all rows that visited it."""
    groups = heads // shared
    batch = (tl.program_id(0) // groups).to(tl.int64)
    group = (tl.program_id(0) % groups).to(tl.int64)
    block = stripe + tl.program_id(1)
    key = block * KEYS + keys_of_columns(KEYS)
    k = _rows(k_ptr + batch * k_stride_b + group * k_stride_h, key, keys, k_stride_l, HEAD_DIM, BLOCK_D)
    v = _rows(v_ptr + batch * v_stride_b + group * v_stride_h, key, keys, v_stride_l, HEAD_DIM, BLOCK_D)
    dk = tl.zeros([KEYS, BLOCK_D], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_D], tl.float32)
    # the first row that sees one of the keys; later rows see it if their sequence and their stick reach that far
    first_row = block * KEYS - (keys - queries) + (0 if ATTEND_CURRENT else 1) if CAUSAL else 0
    first_row_block = tl.maximum(first_row, 0) // ROWS
    for member in range(shared):
        head = group * shared + member
        program = batch * heads + head
        for row_block in range(first_row_block, tl.cdiv(queries, ROWS)):
            row = row_block * ROWS + tl.arange(0, ROWS)
            first_key, last_key = _visible_keys(
                start_ptr, stop_ptr, program, batch, row_block * ROWS, queries, keys, ROWS, KEYS, STARTS,
                ATTEND_CURRENT, CAUSAL,
            )  # fmt: skip
            if (block >= tl.min(first_key, 0) // KEYS) & (block <= tl.max(last_key, 0) // KEYS):
                q_base = q_ptr + batch * q_stride_b + head * q_stride_h
                do_base = do_ptr + batch * do_stride_b + head * do_stride_h
                q = _rows(q_base, row, queries, q_stride_l, HEAD_DIM, BLOCK_D)
                do = _rows(do_base, row, queries, do_stride_l, HEAD_DIM, BLOCK_D)
                inside = row < queries
                saved, saved_block = _saved(stick_ptr, program * queries + row, inside, ROWS)
                state_at = state_ptr + ((program * STRIPE + block - stripe) * queries + row) * 2
                stick = of_threads(tl.load(state_at, mask=inside, other=0.0), ROWS)
                older = of_threads(tl.load(state_at + 1, mask=inside, other=0.0), ROWS)
                z = _logits(q, k, key, first_key, last_key, qk_scale)
                s0, s1, s2, s3, w0, w1, w2, w3, _ = tile_weights(
                    z, block, stick, saved, saved_block, ROWS, KEYS, ASSEMBLY
                )
                weight = in_columns(w0, w1, w2, w3, ROWS, KEYS).to(do.dtype)
                dv = tl.dot(tl.trans(weight), do, dv, input_precision="ieee")
                d_weight = tl.dot(do, tl.trans(v), input_precision="ieee")
                dz, _ = logit_gradients(s0, s1, s2, s3, w0, w1, w2, w3, d_weight, older, ROWS, KEYS)
                dk = tl.dot(tl.trans(dz.to(q.dtype)), q, dk, input_precision="ieee")
    dim = tl.arange(0, BLOCK_D)
    grad_at = (tl.program_id(0).to(tl.int64) * keys + key)[:, None] * HEAD_DIM + dim[None, :]
    inside = (key < keys)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(dk_ptr + grad_at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + grad_at, dv.to(dv_ptr.dtype.element_ty), mask=inside)


def deterministic_backward(
    q: Tensor, k: Tensor, v: Tensor, d_output: Tensor, d_remainder: Tensor, remainder: Tensor, stick: Tensor,
    stop: Tensor, scale: float, attend_current: bool, seq_start: Tensor | None, row_start: Tensor | None,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes the gradients of q, k and v deterministically; arguments and results are those of `backward`."""
    batch, heads, queries, head_dim = q.shape
    groups, keys = k.shape[1], k.shape[2]
    block_d = padded_to_tile(head_dim)
    rows = 32 if block_d * q.element_size() <= 256 else 16
    block_keys = training_block_keys(
        head_dim=head_dim, element_bytes=q.element_size(), shared_memory_bytes=shared_memory_bytes(q)
    )
    row_state = torch.stack([torch.zeros_like(remainder), d_remainder * remainder], dim=-1)
    state = torch.empty((batch, heads, STRIPE_BLOCKS, queries, 2), dtype=torch.float32, device=q.device)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = (torch.empty(each.shape, dtype=each.dtype, device=q.device) for each in (k, v))
    starts = "row" if row_start is not None else "batch" if seq_start is not None else "none"
    start = row_start if row_start is not None else seq_start if seq_start is not None else q
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *d_output.stride()[:3]]
    sizes = [heads, heads // groups, queries, keys, scale * LOG2_E]
    constants = {
        "HEAD_DIM": head_dim, "BLOCK_D": block_d, "ROWS": rows, "KEYS": block_keys, "STRIPE": STRIPE_BLOCKS,
        "STARTS": starts, "ATTEND_CURRENT": attend_current, "ASSEMBLY": has_assembly(q), "CAUSAL": causal,
    }  # fmt: skip
    key_blocks = triton.cdiv(keys, block_keys)
    for stripe in range(0, key_blocks, STRIPE_BLOCKS):
        _rows_kernel[(batch * heads, triton.cdiv(queries, rows))](
            q, k, v, d_output, dq, stick, row_state, state, stop, start, *strides, *sizes, stripe, **constants,
            num_stages=1,
        )  # fmt: skip
        _keys_kernel[(batch * groups, min(STRIPE_BLOCKS, key_blocks - stripe))](
            q, k, v, d_output, dk, dv, stick, state, stop, start, *strides, *sizes, scale, stripe, **constants,
            num_stages=1,
        )  # fmt: skip
    rounded_dq = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    return rounded_dq.copy_(dq.mul_(scale)), dk, dv
