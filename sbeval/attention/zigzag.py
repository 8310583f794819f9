"""Zigzag layout of context parallelism: the chunks that each rank holds, and the order in which it requests keys.

For N ranks a sequence is cut into 2 N chunks of equal length; rank r holds chunks r and 2 N - 1 - r.
"""

import itertools
from typing import NamedTuple

FIRST_RANGE_TOKENS = 4096
"""Length of a chunk's newest range, in keys, if one chunk of the requester sees it; older ranges double in length."""


class KeyRange(NamedTuple):
    """A range of adjacent keys of one chunk, the unit in which keys are transferred.

    Attributes:
        holder: rank that holds the keys.
        newer: whether they are in the holder's newer chunk.
        start: first key, counted from the chunk's beginning.
        stop: one past the last key.
        of_both: whether both chunks of the requesting rank see the keys; otherwise only its newer chunk sees them.
    """

    holder: int
    newer: bool
    start: int
    stop: int
    of_both: bool


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Returns the indices of a rank's older and newer chunk."""
    return rank, 2 * ranks - 1 - rank


def key_ranges(rank: int, ranks: int, chunk_tokens: int) -> list[KeyRange]:
    """Returns the ranges that a rank requests: all keys older than its newer chunk, newest first.

    If chunks have two tokens or more, all ranks have equally many ranges. Ranges at the same index in the lists of two
    ranks need equally much work: a range that both chunks of a rank see has half as many keys. Ranks wait for each
    other at every range, so unequal ranges would cost time.
    """
    cuts = [0]
    size = FIRST_RANGE_TOKENS
    while cuts[-1] < chunk_tokens:
        rest = chunk_tokens - cuts[-1] - size
        cuts.append(cuts[-1] + size if rest >= FIRST_RANGE_TOKENS else chunk_tokens)
        size *= 2
    twice = [chunk_tokens - cut // 2 for cut in (*cuts, *(chunk_tokens + cut for cut in cuts[1:]))]
    once = [chunk_tokens - cut for cut in cuts]
    requests = []
    older, newer = chunks_of(rank, ranks)
    for chunk in reversed(range(newer)):
        of_newer = chunk >= ranks
        of_both = chunk < older
        holder = 2 * ranks - 1 - chunk if of_newer else chunk
        bounds = itertools.pairwise(twice if of_both else once)
        requests += [KeyRange(holder, of_newer, start, stop, of_both) for stop, start in bounds if start < stop]
    return requests
