"""Randomness that depends on names alone.

Every draw is seeded by the text of what it is for, such as ("sb_niah_single_1", 42, 7, "needles"), so it never depends
on other tasks, lengths, samples, processes or the order in which things are built. Bulk draws use raw PCG64 words, a
stream numpy keeps stable between versions.
"""

import hashlib
import random

import numpy as np
from numpy.typing import NDArray


def seeded_random(*name: object) -> random.Random:
    """Returns a generator seeded by a name."""
    return random.Random(_digest(name))


def seeded_words(count: int, *name: object) -> NDArray[np.uint64]:
    """Returns `count` uniform 64-bit words, uint64 [count]; a shorter draw is a prefix of a longer one."""
    words: NDArray[np.uint64] = np.random.PCG64(_digest(name)).random_raw(count)
    return words


def seeded_order(count: int, *name: object) -> NDArray[np.int64]:
    """Returns a random permutation of 0 ... count - 1, int64 [count]."""
    return np.argsort(seeded_words(count, *name), kind="stable")


def _digest(name: tuple[object, ...]) -> int:
    return int.from_bytes(hashlib.sha256("\x1f".join(str(part) for part in name).encode()).digest()[:16], "big")
