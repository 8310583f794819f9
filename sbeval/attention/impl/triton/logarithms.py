"""Sticks as logarithms, for the decode kernels, whose rows are few and whose splits are joined by sums of logarithms.

With a logit z (already times log2 e), a key takes 2^(z - spent) = sigmoid(z) of the stick and leaves 2^-spent of it.
"""

import triton
import triton.language as tl


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
