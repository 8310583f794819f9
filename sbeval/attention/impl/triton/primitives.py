"""Code of the forward and backward kernels: a program's rows, the keys they see, loading tiles, atomic additions."""

import triton
import triton.language as tl

from sbeval.attention.impl.triton.sticks import keys_of_columns


@triton.jit
def place(blocks, all_heads, heads_at_once):
    """Returns the block of rows and the head (counted over the batch) of this program.

    `heads_at_once` heads run at once, so that their keys and values stay in the L2 cache. The rows with the most
    visible keys start first, so that short rows fill the GPU at the end.
    """
    program = tl.program_id(0)
    first = program // (heads_at_once * blocks) * heads_at_once
    together = tl.minimum(heads_at_once, all_heads - first)
    rest = program - first * blocks
    return blocks - 1 - rest // together, first + rest % together


@triton.jit
def first_visible(start_ptr, batch, row, queries, STARTS: tl.constexpr):
    """Returns the first key each row may see: its own start (packed), its sequence's start (left padding), or 0."""
    if STARTS == "row":
        first = tl.load(start_ptr + tl.minimum(row, queries - 1)).to(tl.int32)
    elif STARTS == "batch":
        # a negative start must not lead to a read outside the tensors
        first = tl.maximum(tl.load(start_ptr + batch + tl.zeros_like(row)).to(tl.int32), 0)
    else:
        first = tl.zeros_like(row)
    return first


@triton.jit
def last_visible(
    start_ptr, first_row, queries, keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ATTEND_CURRENT: tl.constexpr, STARTS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Returns the last key each row may see, and the ends of the key blocks that any row sees and that every row sees.

    Rows past the end of the queries see no key: their last key is -1.
    """
    row = first_row + tl.arange(0, BLOCK_M)
    if CAUSAL:
        position = keys - queries + first_row
        last = tl.where(row < queries, position + tl.arange(0, BLOCK_M) - (0 if ATTEND_CURRENT else 1), -1)
        end = tl.minimum(keys, tl.minimum(position + BLOCK_M, keys) + (0 if ATTEND_CURRENT else -1))
        full = tl.maximum(position + (1 if ATTEND_CURRENT else 0), 0) // BLOCK_N
    else:
        # all keys are older than all rows; for packed sequences, the ends of the rows follow all starts in memory
        last = tl.zeros_like(row) + (keys - 1)
        if STARTS == "row":
            last = tl.load(start_ptr + queries + tl.minimum(row, queries - 1)).to(tl.int32) - 1
        end = tl.max(last, 0) + 1
        full = (tl.min(last, 0) + 1) // BLOCK_N
        last = tl.where(row < queries, last, -1)
    return last, tl.cdiv(tl.maximum(end, 0), BLOCK_N), full


@triton.jit
def load_tile(
    base, descriptor, offsets, batch, group, block, stride, limit,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Loads keys or values [BLOCK_N, BLOCK_D] of a block in the order of `keys_of_columns`; 0 outside the tensor.

    COPY loads through a descriptor with the copy engine (TMA), which needs no address registers, except for blocks that
    may reach past the end (MASKED). Otherwise it loads by pointer; `offsets` are relative to the block, so that only
    the block's base address needs 64-bit arithmetic.
    """
    if COPY and not MASKED:
        tile = descriptor.load([batch, group, 0, block * 8, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        at = base + (block + tl.zeros((), tl.int64)) * (BLOCK_N * stride) + offsets
        dim = tl.arange(0, BLOCK_D)
        if MASKED:
            key = block * BLOCK_N + keys_of_columns(BLOCK_N)
            tile = tl.load(at, mask=(key < limit)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            tile = tl.load(at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def load_tiles(
    k_base, k_desc, k_offsets, k_stride, v_base, v_desc, v_offsets, v_stride, batch, group, block, limit,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Loads the keys and the values of a block, each as `load_tile` does."""
    k = load_tile(
        k_base, k_desc, k_offsets, batch, group, block, k_stride, limit, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, COPY
    )
    v = load_tile(
        v_base, v_desc, v_offsets, batch, group, block, v_stride, limit, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED, COPY
    )
    return k, v


@triton.jit
def add_tile(
    tile, base, descriptor, batch, group, block, limit,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """Adds a tile [BLOCK_N, BLOCK_D] to memory atomically. REDUCE: the copy engine does it (TMA reduce)."""
    if REDUCE and not MASKED:
        descriptor.atomic_add([batch, group, 0, block * 8, 0], tile.reshape(1, 1, BLOCK_N // 8, 8, BLOCK_D))
    else:
        key = keys_of_columns(BLOCK_N)[:, None]
        dim = tl.arange(0, BLOCK_D)[None, :]
        at = base + (block + tl.zeros((), tl.int64)) * (BLOCK_N * HEAD_DIM) + key * HEAD_DIM + dim
        tl.atomic_add(at, tile, mask=(block * BLOCK_N + key < limit) & (dim < HEAD_DIM), sem="relaxed")
