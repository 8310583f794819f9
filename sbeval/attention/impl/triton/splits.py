"""Code of both decode kernels: adding a tile of keys, testing for spent sticks, joining the splits of the keys.

A stick is the weight that newer keys leave for older ones; it is spent once it is below the threshold.
"""

import triton
import triton.language as tl

from sbeval.attention.impl.triton.logarithms import add_in_tile, bounded, spent_by, two_sum

# a split stops a little later than the join ends its sum, so that rounding cannot make the two disagree
MARGIN_LOG2: tl.constexpr = tl.constexpr(1e-2)


@triton.jit
def add_tile_of_keys(
    q, k_base, v_base, k_stride, v_stride, block, keys, row_limit, seq_start, minus_newer, out, stick, stick_lo,
    qk_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Adds the output of one tile of keys to the rows; returns the output and the log2 of the stick (high, low)."""
    key = block * BLOCK_N + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    first = block + tl.zeros((), tl.int64)
    within = tl.arange(0, BLOCK_N)[:, None]
    k_at = k_base + first * (BLOCK_N * k_stride) + within * k_stride + dim[None, :]
    v_at = v_base + first * (BLOCK_N * v_stride) + within * v_stride + dim[None, :]
    if MASKED:
        # padding is not read, since it may hold any values
        inside = ((key < keys) & (key >= seq_start))[:, None] & (dim < HEAD_DIM)[None, :]
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
        z = tl.where((key[None, :] <= row_limit[:, None]) & (key >= seq_start)[None, :], z, float("-inf"))
    spent = spent_by(z, EXACT)
    weight = tl.exp2(add_in_tile((z - spent) + stick[:, None], spent, minus_newer, EXACT, ASSEMBLY))
    out = tl.dot(weight.to(v.dtype), v, out, input_precision="ieee")
    stick, stick_lo = two_sum(stick, stick_lo, -tl.sum(spent, 1))
    return out, stick, stick_lo


@triton.jit
def all_spent(stick, inside, log2_threshold, AXIS: tl.constexpr):
    """Whether the stick of every row is below the threshold. NaN counts as not below (a maximum would drop it)."""
    return tl.sum((((stick < log2_threshold) == 0) & inside).to(tl.int32), AXIS) == 0


@triton.jit
def all_spent_by_newer(stick_ptr, split, inside, log2_threshold, ROWS: tl.constexpr, SPLITS: tl.constexpr):
    """Whether newer splits have spent the stick of every row. A split that still runs counts as spending nothing."""
    newer = tl.arange(0, SPLITS)
    row = tl.arange(0, ROWS)
    # volatile: another program may have written since the last load
    known = tl.load(
        stick_ptr + newer[:, None] * ROWS + row[None, :],
        mask=(newer < split)[:, None] & inside[None, :], other=0.0, volatile=True,
    )  # fmt: skip
    return all_spent(tl.sum(known, 0), inside, log2_threshold - MARGIN_LOG2, 0)


@triton.jit
def join(
    partial_ptr, stick_ptr, out_ptr, rem_ptr, out_stride_b, out_stride_h, out_stride_l,
    groups, shared, queries, splits, used_splits, log2_threshold,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr, GAPS: tl.constexpr,
):  # fmt: skip
    """Sums the first `used_splits` splits of one row, newest first, and writes the row's output and remainder.

    GAPS: splits older than the first split that found all sticks spent may not have been written, so they are not read.
    """
    pair = tl.program_id(0).to(tl.int64)
    row_index = tl.program_id(1)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    inside = row < shared * queries
    sticks = stick_ptr + pair * splits * ROWS
    parts = partial_ptr + (pair * splits * ROWS + row_index) * HEAD_DIM
    out = tl.zeros([BLOCK_D], tl.float32)
    left = tl.zeros([ROWS], tl.float32)
    split = 0
    spent_out = log2_threshold > 1.0
    while (spent_out == 0) & (split < used_splits):
        at = split + tl.arange(0, TOGETHER)
        known = tl.load(
            sticks + at[:, None] * ROWS + row[None, :], mask=(at < used_splits)[:, None] & inside[None, :], other=0.0
        )
        through = tl.cumsum(known, 0) + left[None, :]
        before = through - known
        # all rows stop at the split in which the last of them falls below the threshold
        if GAPS:
            ahead = all_spent(before, inside[None, :], log2_threshold, 1)
            used = (tl.cumsum(ahead.to(tl.int32), 0) == 0) & (at < used_splits)
            read = used
        else:
            used = all_spent(before, inside[None, :], log2_threshold, 1) == 0
            read = (at < used_splits) & used
        part = tl.load(
            parts + at.to(tl.int64)[:, None] * (ROWS * HEAD_DIM) + dim[None, :],
            mask=read[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
        )  # fmt: skip
        own = tl.sum(tl.where(row[None, :] == row_index, before, 0.0), 1)
        out += tl.sum(tl.where(used, tl.exp2(own), 0.0)[:, None] * part, 0)
        left += tl.sum(tl.where(used[:, None], known, 0.0), 0)
        spent_out = all_spent(left, inside, log2_threshold, 0)
        split += TOGETHER
    batch, group = pair // groups, pair % groups
    head = group * shared + row_index // queries
    out_at = out_ptr + batch * out_stride_b + head * out_stride_h + (row_index % queries) * out_stride_l
    tl.store(out_at + dim, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
    remainder = tl.exp2(tl.sum(tl.where(row == row_index, left, 0.0), 0))
    tl.store(rem_ptr + pair * shared * queries + row_index, remainder)
