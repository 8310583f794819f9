"""Which parts of a sequence each of N processes holds, and in which order it asks others for keys.

A sequence is 2 N chunks of equal length; process r holds chunks r and 2 N - 1 - r.
"""

import itertools
from typing import NamedTuple

FIRST_PIECE_TOKENS = 4096
"""Keys in the first, newest piece of a chunk if one chunk asks; each older piece has twice as many."""


class Piece(NamedTuple):
    """Adjacent keys of one chunk.

    Attributes:
        holder: rank of the process that has them.
        newer: whether they lie in that process's newer chunk.
        of_both: whether both chunks of the asking process see them; else only its newer chunk.
    """

    holder: int
    newer: bool
    start: int
    stop: int
    of_both: bool


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Returns the older and the newer chunk of a process."""
    return rank, 2 * ranks - 1 - rank


def pieces(rank: int, ranks: int, chunk_tokens: int) -> list[Piece]:
    """Returns all keys that are older than a process's newer chunk, newest first.

    If chunks have two tokens or more, all processes have equally many pieces. Pieces at the same place in the lists are
    equal work: a piece that both chunks see has half as many keys. Processes wait for each other at every piece, so
    unequal pieces would cost time.
    """
    cuts = [0]
    size = FIRST_PIECE_TOKENS
    while cuts[-1] < chunk_tokens:
        rest = chunk_tokens - cuts[-1] - size
        cuts.append(cuts[-1] + size if rest >= FIRST_PIECE_TOKENS else chunk_tokens)
        size *= 2
    twice = [chunk_tokens - cut // 2 for cut in (*cuts, *(chunk_tokens + cut for cut in cuts[1:]))]
    once = [chunk_tokens - cut for cut in cuts]
    asked = []
    older, newer = chunks_of(rank, ranks)
    for chunk in reversed(range(newer)):
        of_newer = chunk >= ranks
        of_both = chunk < older
        holder = 2 * ranks - 1 - chunk if of_newer else chunk
        bounds = itertools.pairwise(twice if of_both else once)
        asked += [Piece(holder, of_newer, start, stop, of_both) for stop, start in bounds if start < stop]
    return asked
