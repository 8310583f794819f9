"""Sticks as logarithms, for the decode kernels: few rows, and splits that are joined by adding logarithms.

With a logit z (already times log2 e) and spent = log2(1 + 2^z), a key takes the share 2^(z - spent) = sigmoid(z) of the
stick and leaves the share 2^-spent.
"""

import triton
import triton.language as tl


@triton.jit
def spent_by(z, EXACT: tl.constexpr):
    """Returns log2(1 + 2^z): minus the log2 of the share that a key with base-2 logit z leaves. NaN stays NaN.

    log2(1 + x) for x = 2^-|z| is a polynomial on the FMA units, which saves a second special-function call per logit.
    The error is below 2.1e-4; the relative error is below 9e-4 and falls to 0 with x, so sums of many small shares are
    right. EXACT, for fp32 inputs, uses the logarithm and corrects the rounding of 1 + x.
    """
    # `* -1.0` compiles to a sign modifier of the instruction, `-x` to a subtraction from zero
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
    """Clamps logits to 30,000: larger ones take the whole stick in any precision, and infinity would make NaN."""
    return tl.minimum(z, 30000.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_half(x, ASSEMBLY: tl.constexpr):
    """Converts fp32 to fp16, clamped to the largest finite number. NaN stays NaN."""
    if ASSEMBLY:
        # converts two values at once; without its saturation, each logit would need a separate minimum
        half = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        half = tl.minimum(x, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return half


@triton.jit
def add_in_tile(total, spent, matrix, EXACT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Returns total + spent @ matrix: adds to each key the values spent by other keys of its tile, times a factor.

    `matrix` [other key, key] holds the factors. This is one matmul on the tensor cores, accumulated onto `total`.
    """
    if EXACT:
        return tl.dot(spent, matrix, total, input_precision="ieee")
    else:
        return tl.dot(to_half(spent, ASSEMBLY), matrix, total)


@triton.jit
def two_sum(high, low, x):
    """Adds x to the unevaluated sum high + low and keeps the rounding error in low (Knuth's two-sum)."""
    total = high + x
    virtual = total - high
    lost = (high - (total - virtual)) + (x - virtual)
    return total, low + lost
