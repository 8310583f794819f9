"""Pieces of a tile shared by the forward and backward kernels. Everything is in base 2.

With a logit z (already times log2 e), a key takes sigmoid(z) of the stick: `log2_taken` is its log, and `spent`,
log2(1 + 2^z), is minus the log of what it leaves.
"""

import triton
import triton.language as tl


@triton.jit
def log2_one_plus(x, EXACT: tl.constexpr):
    """log2(1 + x) for x in [0, 1].

    A polynomial on the FMA units (relative error 8.4e-6, far below fp16 rounding) spares a second special-function call
    a logit; EXACT corrects the rounding of 1 + x instead, for fp32 inputs.
    """
    if EXACT:
        rounded = 1.0 + x
        ratio = tl.where(rounded == 1.0, 1.0, x / tl.where(rounded == 1.0, 1.0, rounded - 1.0))
        return tl.where(rounded == 1.0, x * 1.4426950408889634, tl.log2(rounded) * ratio)
    else:
        tail = 0.14603176712989807 - 0.0344354622066021 * x
        tail = 0.46917369961738586 + x * (-0.3030352294445038 + x * tail)
        return x * (1.4426828622817993 + x * (-0.7204261422157288 + x * tail))


@triton.jit
def split_stick(z, EXACT: tl.constexpr):
    """Returns (log2_taken, spent) of logits in base 2; exact limits at -inf and +inf, NaN stays NaN."""
    shared = log2_one_plus(tl.exp2(-tl.abs(z)), EXACT)
    return tl.minimum(z, 0.0) - shared, tl.maximum(z, 0.0) + shared


@triton.jit
def sum_newer(spent, newer, EXACT: tl.constexpr):
    """For each key of a tile, what the newer keys of that tile spend; `newer` is 1 where row is newer than column.

    One matrix product on the tensor cores. Past 30,000 the stick is gone in any precision: the bound keeps fp16 finite.
    """
    bounded = tl.minimum(spent, 30000.0)
    if EXACT:
        return tl.dot(bounded, newer, input_precision="ieee")
    else:
        return tl.dot(bounded.to(newer.dtype), newer)


@triton.jit
def two_sum(high, low, x):
    """Adds x to the unevaluated sum high + low without losing what rounding drops (Knuth's two-sum)."""
    total = high + x
    virtual = total - high
    lost = (high - (total - virtual)) + (x - virtual)
    return total, low + lost
