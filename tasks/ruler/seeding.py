"""Randomness that depends on names alone.

Every draw is seeded by the text of what it is for, such as ("sb_niah_single_1", 42, 7, "needles"), so it never depends
on other tasks, lengths, samples, processes or the order in which things are built. Bulk draws use raw PCG64 words or
hashed numbers, which stay the same between versions of numpy.
"""

import hashlib
import random

import numpy as np
from numpy.typing import NDArray


def seeded_random(*name: object) -> random.Random:
    """Returns a generator seeded by a name."""
    return random.Random(_digest(name))


def seeded_order(count: int, *name: object) -> NDArray[np.int64]:
    """Returns a random permutation of 0 ... count - 1, int64 [count].

    Numbers are sorted by 16 random bits, which numpy does in linear time; the few equal ones keep their order.
    """
    bits = (np.random.PCG64(_digest(name)).random_raw(count) >> np.uint64(48)).astype(np.uint16)
    return np.argsort(bits, kind="stable")


def seeded_ranks(numbers: NDArray[np.int64], *name: object) -> NDArray[np.uint64]:
    """Hashes each number to a uniform 64-bit word, uint64 of the same shape.

    Sorting items by the ranks of their numbers is a shuffle in which a subset keeps its order. The hash is the
    finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    start = np.uint64(_digest(name) & (2**64 - 1))
    with np.errstate(over="ignore"):
        x = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + start
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _digest(name: tuple[object, ...]) -> int:
    return int.from_bytes(hashlib.sha256("\x1f".join(str(part) for part in name).encode()).digest()[:16], "big")
