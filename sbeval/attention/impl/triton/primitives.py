"""Pieces of a tile shared by the forward and backward kernels. Everything is in base 2.

With a logit z (already times log2 e), a key takes 2^(z - spent) = sigmoid(z) of the stick and leaves 2^-spent of it.
"""

import triton
import triton.language as tl


@triton.jit
def spent_by(z, EXACT: tl.constexpr):
    """log2(1 + 2^z): what a key with logit z in base 2 leaves of the stick, as minus its log2. NaN stays NaN.

    log2(1 + x) for x = 2^-|z| is a polynomial on the FMA units (relative error 5.7e-5, below fp16 rounding), which
    spares a second special-function call a logit; EXACT, for fp32 inputs, corrects the rounding of 1 + x instead.
    """
    # times -1 becomes a sign modifier of the instruction, where a minus sign would be a subtraction from zero
    x = tl.exp2(tl.abs(z) * -1.0)
    if EXACT:
        rounded = 1.0 + x
        ratio = tl.where(rounded == 1.0, 1.0, x / tl.where(rounded == 1.0, 1.0, rounded - 1.0))
        return tl.maximum(z, 0.0) + tl.where(rounded == 1.0, x * 1.4426950408889634, tl.log2(rounded) * ratio)
    else:
        tail = 0.4418979287147522 + x * (-0.22711801528930664 + x * 0.05965083837509155)
        return tl.maximum(z, 0.0) + x * (1.4426132440567017 + x * (-0.7169872522354126 + x * tail))


@triton.jit
def bounded(z):
    """Logits up to 30,000: past that a key takes the whole stick in any precision, and sums in fp16 stay finite."""
    return tl.minimum(z, 30000.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def take_off_newer(total, spent, minus_newer, EXACT: tl.constexpr):
    """Takes off `total`, for each key of a tile, what the newer keys of that tile spend.

    `minus_newer` is -1 where row > column, else 0: one matrix product on the tensor cores, accumulated onto `total`.
    """
    if EXACT:
        return tl.dot(spent, minus_newer, total, input_precision="ieee")
    else:
        return tl.dot(spent.to(minus_newer.dtype), minus_newer, total)


@triton.jit
def two_sum(high, low, x):
    """Adds x to the unevaluated sum high + low without losing what rounding drops (Knuth's two-sum)."""
    total = high + x
    virtual = total - high
    lost = (high - (total - virtual)) + (x - virtual)
    return total, low + lost
