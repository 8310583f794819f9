"""Random draws that are seeded by names, and the random keys and values of needles.

The seed of a draw is the hash of its name, such as ("sb_niah_single_1", 42, 7, "needles"): task, seed, sample and
purpose. A draw therefore never depends on other tasks, lengths, samples or processes, nor on the order in which samples
are built. Bulk draws use raw PCG64 words or hashed numbers, which do not change between versions of numpy.
"""

import functools
import hashlib
import math
import random
import string
import uuid
from collections.abc import Callable, Container
from typing import Literal

import numpy as np
from numpy.typing import NDArray


def seeded_random(*name: object) -> random.Random:
    """Returns a random generator that is seeded by a name."""
    return random.Random(seed_of(*name))


def seeded_order(count: int, *name: object) -> NDArray[np.int64]:
    """Returns a random permutation of 0 ... count - 1, int64 [count].

    The numbers are sorted by 16 random bits each, which numpy does in linear time. Numbers with equal bits keep their
    ascending order.
    """
    bits = (np.random.PCG64(seed_of(*name)).random_raw(count) >> np.uint64(48)).astype(np.uint16)
    return np.argsort(bits, kind="stable")


def seeded_ranks(numbers: NDArray[np.int64], *name: object) -> NDArray[np.uint64]:
    """Hashes each number with a seed made of `name` to a uniform 64-bit integer; returns uint64 of the same shape.

    Items that are sorted by the hashes of their numbers are shuffled. If some items are left out, the others keep their
    relative order. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    start = np.uint64(seed_of(*name) & (2**64 - 1))
    with np.errstate(over="ignore"):
        x = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + start
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def seed_of(*name: object) -> int:
    """Returns a 128-bit seed: the first bytes of the SHA-256 of a name."""
    return int.from_bytes(hashlib.sha256("\x1f".join(str(item) for item in name).encode()).digest()[:16], "big")


NeedleType = Literal["words", "numbers", "uuids"]

_DIGITS = 7


@functools.cache
def word_lists() -> tuple[list[str], list[str], list[str]]:
    """Returns wonderwords' nouns, adjectives and verbs, each sorted."""
    from wonderwords import RandomWord  # imported late: it reads its word lists, which checking options does not need

    words = RandomWord()
    nouns, adjectives, verbs = (words.filter(include_categories=[kind]) for kind in ("noun", "adjective", "verb"))
    return nouns, adjectives, verbs


@functools.cache
def short_nouns() -> list[str]:
    """Returns wonderwords' nouns that consist of 4 to 9 lower-case letters."""
    nouns, _, _ = word_lists()
    return [noun for noun in nouns if 4 <= len(noun) <= 9 and set(noun) <= set(string.ascii_lowercase)]


def draw(kind: NeedleType, rng: random.Random) -> str:
    """Draws a key or value of a kind: an adjective and a noun joined by a hyphen, a 7-digit number, or a UUID 4."""
    if kind == "words":
        nouns, adjectives, _ = word_lists()
        return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
    if kind == "numbers":
        return str(rng.randint(10 ** (_DIGITS - 1), 10**_DIGITS - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def draw_distinct(kind: NeedleType, count: int, rng: random.Random, taken: frozenset[str] | set[str]) -> list[str]:
    """Draws `count` different keys or values, none of them in `taken`."""
    return distinct(count, lambda: draw(kind, rng), taken)


def distinct(count: int, draw_text: Callable[[], str], taken: Container[str] = ()) -> list[str]:
    """Calls `draw_text` until it has returned `count` different texts that are not in `taken`, and returns these."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        if (text := draw_text()) not in taken:
            drawn[text] = None
    return list(drawn)


def log_count(kind: NeedleType) -> float:
    """Returns the natural logarithm of the number of possible keys or values of a kind: the NLL of a random guess."""
    if kind == "words":
        nouns, adjectives, _ = word_lists()
        return math.log(len(nouns) * len(adjectives))
    return math.log(9 * 10 ** (_DIGITS - 1)) if kind == "numbers" else 122 * math.log(2)
