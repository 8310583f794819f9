"""How the keys of a tile share out what is left of each row's stick: products and sums along the keys of a row.

With e = 2^z (z the logit times log2 e) a key takes the share e / (1 + e) of the stick and leaves 1 / (1 + e). Nothing
here needs a logarithm, and no product along the keys needs shared memory or tensor cores, because of the order in
which a tile holds its keys: column 8 j + u is key u J + j. Tensor cores leave two neighbours of every 8 columns of a
row to a thread, so that each of four threads holds 2 J consecutive keys, and the rest is an exchange between the four.
The functions are right in any layout; in this one they are fast.

Shapes: M rows of a tile, N its keys, J = N / 8, G = J / 2 groups of four keys in a thread. Tensors [M, 4, G] are in
key order, oldest first, one for each place in a group; tensors [M, 2, 2] belong to the four threads of a row.
"""

import triton
import triton.language as tl

# A product of 1 + e must not exceed this, past which its reciprocal is no normal number.
LARGEST_PRODUCT: tl.constexpr = tl.constexpr(2.0**126)


@triton.jit
def keys_of_columns(N: tl.constexpr):
    """[N]: which key of a tile each of its columns holds."""
    column = tl.arange(0, N)
    return column % 8 * (N // 8) + column // 8


@triton.jit
def reciprocal(x, ASSEMBLY: tl.constexpr):
    """1 / x, within a unit in the last place, 0 above 2^126. A division that rounds correctly costs five times that."""
    if ASSEMBLY:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / x
    return inverse


@triton.jit
def of_threads(x, M: tl.constexpr):
    """[M] to [M, 2, 2], the same for the four threads of a row."""
    return x[:, None, None] + tl.zeros([M, 2, 2], x.dtype)


@triton.jit
def of_rows(x):
    """[M, 2, 2], the same for the four threads of a row, to [M]."""
    return tl.max(tl.max(x, 2), 1)


@triton.jit
def _halves(x, M: tl.constexpr, WIDTH: tl.constexpr):
    """[M, 4, WIDTH] to its even and its odd entries."""
    return tl.split(x.reshape(M, 4, WIDTH // 2, 2))


@triton.jit
def _woven(even, odd, M: tl.constexpr, WIDTH: tl.constexpr):
    """[M, 4, WIDTH] of even and odd entries."""
    return tl.join(even, odd).reshape(M, 4, WIDTH)


@triton.jit
def in_groups(x, M: tl.constexpr, N: tl.constexpr):
    """[M, N] in column order to four [M, 4, G]: the oldest keys of all groups of four, the next, up to the newest."""
    x = x.reshape(M, N // 8, 8).trans(0, 2, 1).reshape(M, 4, N // 4)
    even, odd = _halves(x, M, N // 4)
    first, third = _halves(even, M, N // 8)
    second, fourth = _halves(odd, M, N // 8)
    return first, second, third, fourth


@triton.jit
def in_columns(first, second, third, fourth, M: tl.constexpr, N: tl.constexpr):
    """What `in_groups` took apart, [M, N]."""
    even, odd = _woven(first, third, M, N // 8), _woven(second, fourth, M, N // 8)
    return _woven(even, odd, M, N // 4).reshape(M, 8, N // 8).trans(0, 2, 1).reshape(M, N)


@triton.jit
def _all_groups(left, taken, M: tl.constexpr, G: tl.constexpr):
    """What all groups of a thread leave and take of a stick of 1, both [M, 4]."""
    if G == 1:
        return left.reshape(M, 4), taken.reshape(M, 4)
    else:
        older, newer = _halves(left, M, G)
        older_taken, newer_taken = _halves(taken, M, G)
        return _all_groups(older * newer, tl.fma(newer, older_taken, newer_taken), M, G // 2)


@triton.jit
def before_groups(left, start, M: tl.constexpr, G: tl.constexpr):
    """[M, 4, G]: the stick that reaches each group of a thread, when `start` [M, 4] reaches the thread."""
    if G == 1:
        return start.reshape(M, 4, 1)
    else:
        older, newer = _halves(left, M, G)
        before = before_groups(older * newer, start, M, G // 2)
        return _woven(before * newer, before, M, G)


@triton.jit
def share_between_threads(left, taken, M: tl.constexpr, G: tl.constexpr):
    """What the newer threads leave to each thread of a row, and what all four leave of a stick of 1, both [M, 2, 2]."""
    product, sum_taken = _all_groups(left, taken, M, G)
    # the product has lost a small share to rounding, one key at a time, and one minus a large one is inexact
    left = tl.where(sum_taken < 0.5, 1.0 - sum_taken, product).reshape(M, 2, 2)
    place = tl.arange(0, 2)
    neighbour = tl.flip(left, 2)
    pair = left * neighbour
    other_pair = tl.flip(pair, 1)
    newer = tl.where(place[None, None, :] == 0, neighbour, 1.0) * tl.where(place[None, :, None] == 0, other_pair, 1.0)
    return newer, pair * other_pair


@triton.jit
def take_in_eights(e, stick, largest, M: tl.constexpr, N: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Weights of a tile with one reciprocal for eight keys. N is 32 at least.

    Args:
        e: [M, N] 2^logit, column order.
        stick: [M, 2, 2] what newer tiles leave.
        largest: [M, 4] largest product of eight keys so far: above LARGEST_PRODUCT the weights are wrong. They are NaN,
            and so is the stick, where an infinite product met a factor of 0.
        M: rows.
        N: keys.
        ASSEMBLY: whether inline assembly runs.

    Returns:
        Weights [M, N] in column order; [M, 2, 2] what the tile leaves of the stick; `largest` with this tile.
    """
    G: tl.constexpr = N // 32
    e04, e15, e26, e37 = in_groups(e, M, N)
    e0, e4 = _halves(e04, M, N // 16)
    e1, e5 = _halves(e15, M, N // 16)
    e2, e6 = _halves(e26, M, N // 16)
    e3, e7 = _halves(e37, M, N // 16)
    # the product of all 1 + e, minus one, so that rounding takes nothing from it where all e are tiny
    excess = tl.fma(e7, e6, e7 + e6)
    excess = tl.fma(excess, e5, excess + e5)
    excess = tl.fma(excess, e4, excess + e4)
    excess = tl.fma(excess, e3, excess + e3)
    excess = tl.fma(excess, e2, excess + e2)
    excess = tl.fma(excess, e1, excess + e1)
    excess = tl.fma(excess, e0, excess + e0)
    largest = tl.maximum(largest, tl.max(excess, 2))
    left = reciprocal(1.0 + excess, ASSEMBLY)
    newer, all_left = share_between_threads(left, excess * left, M, G)
    remaining = before_groups(left, (stick * newer).reshape(M, 4), M, G) * left
    w0 = e0 * remaining
    remaining += w0
    w1 = e1 * remaining
    remaining += w1
    w2 = e2 * remaining
    remaining += w2
    w3 = e3 * remaining
    remaining += w3
    w4 = e4 * remaining
    remaining += w4
    w5 = e5 * remaining
    remaining += w5
    w6 = e6 * remaining
    remaining += w6
    w7 = e7 * remaining
    w04, w15 = _woven(w0, w4, M, N // 16), _woven(w1, w5, M, N // 16)
    w26, w37 = _woven(w2, w6, M, N // 16), _woven(w3, w7, M, N // 16)
    return in_columns(w04, w15, w26, w37, M, N), stick * all_left, largest


@triton.jit
def take_one_by_one(e, M: tl.constexpr, N: tl.constexpr, ASSEMBLY: tl.constexpr):
    """What a group of keys does with a stick of 1 that reaches it, with a reciprocal for every key and e of any size.

    Returns:
        What a group leaves, [M, 4, G]; what each key takes of what reaches it, as four [M, 4, G]; what it takes of what
        reaches its group, likewise.
    """
    e = tl.minimum(e, LARGEST_PRODUCT, propagate_nan=tl.PropagateNan.ALL)
    left = reciprocal(1.0 + e, ASSEMBLY)
    l0, l1, l2, l3 = in_groups(left, M, N)
    s0, s1, s2, s3 = in_groups(e * left, M, N)
    l23 = l3 * l2
    l123 = l23 * l1
    return l123 * l0, s0, s1, s2, s3, s0 * l123, s1 * l23, s2 * l3, s3


@triton.jit
def _sums_before_groups(total, start, M: tl.constexpr, G: tl.constexpr):
    """[M, 4, G]: `start` [M, 4] and the totals of a thread's older groups."""
    if G == 1:
        return start.reshape(M, 4, 1)
    else:
        older, newer = _halves(total, M, G)
        before = _sums_before_groups(older + newer, start, M, G // 2)
        return _woven(before, before + older, M, G)


@triton.jit
def sums_of_older(x0, x1, x2, x3, older_tiles, M: tl.constexpr, N: tl.constexpr):
    """For each key the sum over all older keys, as four [M, 4, G], and [M, 2, 2] that of all keys.

    The summands `x0` to `x3` are as `in_groups` gives them; `older_tiles` [M, 2, 2] is the sum over the tiles before.
    """
    total = (x0 + x1) + (x2 + x3)
    thread = tl.sum(total, 2).reshape(M, 2, 2)
    place = tl.arange(0, 2)
    neighbour = tl.flip(thread, 2)
    pair = thread + neighbour
    other_pair = tl.flip(pair, 1)
    older = tl.where(place[None, None, :] == 1, neighbour, 0.0) + tl.where(place[None, :, None] == 1, other_pair, 0.0)
    before0 = _sums_before_groups(total, (older_tiles + older).reshape(M, 4), M, N // 16)
    before1 = before0 + x0
    before2 = before1 + x1
    return before0, before1, before2, before2 + x2, older_tiles + (pair + other_pair)
