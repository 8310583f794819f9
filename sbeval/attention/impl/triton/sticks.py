"""Weights of a tile's keys from the stick, the weight that newer keys leave: products and sums along a row's keys.

With e = 2^z (z the logit times log2 e) a key takes the share e / (1 + e) of the stick and leaves 1 / (1 + e). So a tile
of the forward pass needs one exponential for each key and one reciprocal for eight keys. The paper's log-space form
needs two exponentials or more, a softplus and a matmul with a triangular matrix.

Products along the keys stay within a thread, without shared memory or tensor cores, because of the order in which a
tile holds its keys: column 8 j + u is key u J + j. The copy engine reads K as a grid of J by K / J keys and delivers
each tile transposed. Tensor cores give a thread two neighbours of every 8 columns of a row, so each of the four threads
of a row holds 2 J consecutive keys, and only the four threads exchange values. The functions are correct in any layout
and fast in this one.

If the product of eight factors overflows fp32 or is NaN, the forward kernel visits the block again, key by key. 1 + e
rounds a small e away, always in the same direction if all keys are alike, so products are stored minus one. In the
worst case, a million keys with the same logit, the stick is then correct to 0.2 percent (simulated).

Shapes: M rows of a tile, N its keys, J = N / 8, G = J / 2 groups of four keys in a thread. Tensors [M, 4, G] are in key
order, oldest first, one for each place in a group; tensors [M, 2, 2] belong to the four threads of a row.
"""

import triton
import triton.language as tl

# above this, the reciprocal of a product of 1 + e is not a normal number
LARGEST_PRODUCT: tl.constexpr = tl.constexpr(2.0**126)


@triton.jit
def keys_of_columns(N: tl.constexpr):
    """Returns [N]: the key of a tile that each of its columns holds."""
    column = tl.arange(0, N)
    return column % 8 * (N // 8) + column // 8


@triton.jit
def reciprocal(x, ASSEMBLY: tl.constexpr):
    """Returns 1 / x to one unit in the last place, 0 above 2^126. Correctly rounded division costs five times more."""
    if ASSEMBLY:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / x
    return inverse


@triton.jit
def of_threads(x, M: tl.constexpr):
    """Broadcasts [M] to [M, 2, 2], the same value for the four threads of a row."""
    return x[:, None, None] + tl.zeros([M, 2, 2], x.dtype)


@triton.jit
def of_rows(x):
    """Reduces [M, 2, 2], whose values are the same for the four threads of a row, to [M]."""
    return tl.max(tl.max(x, 2), 1)


@triton.jit
def _halves(x, M: tl.constexpr, WIDTH: tl.constexpr):
    """Splits [M, 4, WIDTH] into its even and its odd entries."""
    return tl.split(x.reshape(M, 4, WIDTH // 2, 2))


@triton.jit
def _woven(even, odd, M: tl.constexpr, WIDTH: tl.constexpr):
    """Interleaves even and odd entries to [M, 4, WIDTH]; the inverse of `_halves`."""
    return tl.join(even, odd).reshape(M, 4, WIDTH)


@triton.jit
def in_groups(x, M: tl.constexpr, N: tl.constexpr):
    """Splits [M, N] in column order into four [M, 4, G]: the oldest key of each group of four, up to the newest."""
    x = x.reshape(M, N // 8, 8).trans(0, 2, 1).reshape(M, 4, N // 4)
    even, odd = _halves(x, M, N // 4)
    first, third = _halves(even, M, N // 8)
    second, fourth = _halves(odd, M, N // 8)
    return first, second, third, fourth


@triton.jit
def in_columns(first, second, third, fourth, M: tl.constexpr, N: tl.constexpr):
    """Joins four [M, 4, G] to [M, N] in column order; the inverse of `in_groups`."""
    even, odd = _woven(first, third, M, N // 8), _woven(second, fourth, M, N // 8)
    return _woven(even, odd, M, N // 4).reshape(M, 8, N // 8).trans(0, 2, 1).reshape(M, N)


@triton.jit
def _all_groups(left, taken, M: tl.constexpr, G: tl.constexpr):
    """Returns the shares that all groups of a thread together leave and take of a stick of length 1, both [M, 4]."""
    if G == 1:
        return left.reshape(M, 4), taken.reshape(M, 4)
    else:
        older, newer = _halves(left, M, G)
        older_taken, newer_taken = _halves(taken, M, G)
        return _all_groups(older * newer, tl.fma(newer, older_taken, newer_taken), M, G // 2)


@triton.jit
def before_groups(left, start, M: tl.constexpr, G: tl.constexpr):
    """Returns [M, 4, G]: the stick that reaches each group of a thread, if `start` [M, 4] reaches the thread."""
    if G == 1:
        return start.reshape(M, 4, 1)
    else:
        older, newer = _halves(left, M, G)
        before = before_groups(older * newer, start, M, G // 2)
        return _woven(before * newer, before, M, G)


@triton.jit
def share_between_threads(left, taken, M: tl.constexpr, G: tl.constexpr):
    """Returns the shares of a stick of length 1 that reach each thread of a row, and that all four leave: [M, 2, 2]."""
    product, sum_taken = _all_groups(left, taken, M, G)
    # rounding takes a small share off the product at every key; one minus the sum is exact enough only for small sums
    left = tl.where(sum_taken < 0.5, 1.0 - sum_taken, product).reshape(M, 2, 2)
    place = tl.arange(0, 2)
    neighbour = tl.flip(left, 2)
    pair = left * neighbour
    other_pair = tl.flip(pair, 1)
    newer = tl.where(place[None, None, :] == 0, neighbour, 1.0) * tl.where(place[None, :, None] == 0, other_pair, 1.0)
    return newer, pair * other_pair


@triton.jit
def take_in_eights(e, stick, largest, M: tl.constexpr, N: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Computes the weights of a tile with one reciprocal for eight keys. N is at least 32.

    Args:
        e: [M, N] 2^logit, column order.
        stick: [M, 2, 2] the stick that newer tiles leave.
        largest: [M, 4] largest product of eight keys so far. Above LARGEST_PRODUCT the weights are wrong. If an
            infinite product was multiplied by a factor of 0, the weights and the stick are NaN.
        M: rows.
        N: keys.
        ASSEMBLY: whether inline assembly runs.

    Returns:
        Weights [M, N] in column order; the stick [M, 2, 2] that the tile leaves; `largest` including this tile.
    """
    G: tl.constexpr = N // 32
    e04, e15, e26, e37 = in_groups(e, M, N)
    e0, e4 = _halves(e04, M, N // 16)
    e1, e5 = _halves(e15, M, N // 16)
    e2, e6 = _halves(e26, M, N // 16)
    e3, e7 = _halves(e37, M, N // 16)
    # the product of all 1 + e, minus one, so that tiny e are not rounded away
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
    """Computes shares of a stick of length 1 that reaches a group of keys, for any e, with one reciprocal for each key.

    Returns:
        The share that each group leaves, [M, 4, G]; the share that each key takes of the stick that reaches the key, as
        four [M, 4, G]; the share that each key takes of the stick that reaches its group, also as four [M, 4, G].
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
    """Returns [M, 4, G]: for each group `start` [M, 4] plus the totals of the thread's older groups."""
    if G == 1:
        return start.reshape(M, 4, 1)
    else:
        older, newer = _halves(total, M, G)
        before = _sums_before_groups(older + newer, start, M, G // 2)
        return _woven(before, before + older, M, G)


@triton.jit
def sums_of_older(x0, x1, x2, x3, older_tiles, M: tl.constexpr, N: tl.constexpr):
    """Returns for each key the sum over all older keys, as four [M, 4, G], and the sum over all keys, [M, 2, 2].

    The summands `x0` to `x3` are in the layout of `in_groups`; `older_tiles` [M, 2, 2] is the sum over older tiles.
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
