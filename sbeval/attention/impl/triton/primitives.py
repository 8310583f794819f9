"""Pieces of a tile shared by the forward and backward kernels. Everything is in base 2.

With a logit z (already times log2 e), a key takes 2^(z - spent) = sigmoid(z) of the stick and leaves 2^-spent of it.
"""

import triton
import triton.language as tl


@triton.jit
def place(blocks, all_heads, heads_at_once):
    """The block of rows and the head (counted over the batch) of this program.

    `heads_at_once` heads go together, so that their keys and values stay in the cache, the longest rows of all of them
    first, so that short rows fill the machine at the end.
    """
    program = tl.program_id(0)
    first = program // (heads_at_once * blocks) * heads_at_once
    together = tl.minimum(heads_at_once, all_heads - first)
    rest = program - first * blocks
    return blocks - 1 - rest // together, first + rest % together


@triton.jit
def first_visible(start_ptr, batch, row, queries, STARTS: tl.constexpr):
    """The first key each row may see: of its own (packed sequences), of its sequence in the batch (padding), or 0."""
    if STARTS == "row":
        first = tl.load(start_ptr + tl.minimum(row, queries - 1)).to(tl.int32)
    elif STARTS == "batch":
        first = tl.load(start_ptr + batch + tl.zeros_like(row)).to(tl.int32)
    else:
        first = tl.zeros_like(row)
    return first


@triton.jit
def load_tile(
    base, descriptor, offsets, batch, group, block, stride, limit,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """Loads keys (or values) [BLOCK_N, BLOCK_D] of one block; what lies outside is 0.

    COPY: through a descriptor, by the copy engine, which needs no addresses in registers. Else by pointers: `offsets`
    are those within a block, so that only the block's own base is 64-bit arithmetic.
    """
    if COPY:
        tile = descriptor.load([batch, group, block * BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        at = base + (block + tl.zeros((), tl.int64)) * (BLOCK_N * stride) + offsets
        dim = tl.arange(0, BLOCK_D)
        if MASKED:
            key = block * BLOCK_N + tl.arange(0, BLOCK_N)
            tile = tl.load(at, mask=(key < limit)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            tile = tl.load(at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def add_tile(
    tile, base, descriptor, batch, group, block, limit,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """Adds a tile [BLOCK_N, BLOCK_D] to memory, atomically: others add to the same rows. REDUCE: by the copy engine."""
    if REDUCE:
        descriptor.atomic_add([batch, group, block * BLOCK_N, 0], tile.reshape(1, 1, BLOCK_N, BLOCK_D))
    else:
        key = tl.arange(0, BLOCK_N)[:, None]
        dim = tl.arange(0, BLOCK_D)[None, :]
        at = base + (block + tl.zeros((), tl.int64)) * (BLOCK_N * HEAD_DIM) + key * HEAD_DIM + dim
        tl.atomic_add(at, tile, mask=(block * BLOCK_N + key < limit) & (dim < HEAD_DIM), sem="relaxed")


@triton.jit
def spent_by(z, EXACT: tl.constexpr):
    """log2(1 + 2^z): what a key with logit z in base 2 leaves of the stick, as minus its log2. NaN stays NaN.

    log2(1 + x) for x = 2^-|z| is a polynomial on the FMA units, which spares a second special-function call a logit.
    Its error is below 2.1e-4, and relative to its value below 9e-4 and falling to 0 with x: many small shares add up
    right. EXACT, for fp32 inputs, takes the logarithm and corrects the rounding of 1 + x.
    """
    # times -1 becomes a sign modifier of the instruction, where a minus sign would be a subtraction from zero
    x = tl.exp2(tl.abs(z) * -1.0)
    if EXACT:
        rounded = 1.0 + x
        ratio = tl.where(rounded == 1.0, 1.0, x / tl.where(rounded == 1.0, 1.0, rounded - 1.0))
        return tl.maximum(z, 0.0) + tl.where(rounded == 1.0, x * 1.4426950408889634, tl.log2(rounded) * ratio)
    else:
        tail = tl.fma(x, tl.fma(x, tl.fma(x, -0.10076811, 0.35777816), -0.69991547), 1.4426950408889634)
        return tl.fma(x, tail, tl.maximum(z, 0.0))


@triton.jit
def bounded(z):
    """Logits up to 30,000: past that a key takes the whole stick in any precision, and infinity stays away."""
    return tl.minimum(z, 30000.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_half(x, ASSEMBLY: tl.constexpr):
    """fp32 to fp16, at most the largest finite number. NaN stays NaN."""
    if ASSEMBLY:
        # two values an instruction; without saturation a separate minimum would be one more a logit
        half = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        half = tl.minimum(x, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return half


@triton.jit
def add_in_tile(total, spent, matrix, EXACT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Adds to `total`, for each key of a tile, what other keys of that tile spend, times `matrix` [other, key].

    One matrix product on the tensor cores, accumulated onto `total`.
    """
    if EXACT:
        return tl.dot(spent, matrix, total, input_precision="ieee")
    else:
        return tl.dot(to_half(spent, ASSEMBLY), matrix, total)


@triton.jit
def two_sum(high, low, x):
    """Adds x to the unevaluated sum high + low without losing what rounding drops (Knuth's two-sum)."""
    total = high + x
    virtual = total - high
    lost = (high - (total - virtual)) + (x - virtual)
    return total, low + lost
