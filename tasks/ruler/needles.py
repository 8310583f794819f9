"""Keys and values of needles: words, numbers and UUIDs, drawn uniformly."""

import functools
import math
import random
import uuid
from typing import Literal, get_args

NeedleType = Literal["words", "numbers", "uuids"]
NEEDLE_TYPES: tuple[NeedleType, ...] = get_args(NeedleType)

_DIGITS = 7


@functools.cache
def word_lists() -> tuple[list[str], list[str], list[str]]:
    """Returns wonderwords' nouns, adjectives and verbs, each sorted."""
    from wonderwords import RandomWord

    words = RandomWord()
    nouns, adjectives, verbs = (words.filter(include_categories=[kind]) for kind in ("noun", "adjective", "verb"))
    return nouns, adjectives, verbs


def draw(kind: NeedleType, rng: random.Random) -> str:
    """Draws one key or value: an adjective and a noun with a hyphen, a number of seven digits, or a version-4 UUID."""
    if kind == "words":
        nouns, adjectives, _ = word_lists()
        return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
    if kind == "numbers":
        return str(rng.randint(10 ** (_DIGITS - 1), 10**_DIGITS - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def draw_distinct(kind: NeedleType, count: int, rng: random.Random, taken: frozenset[str] | set[str]) -> list[str]:
    """Draws `count` different keys or values, none of them in `taken`."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        candidate = draw(kind, rng)
        if candidate not in taken:
            drawn[candidate] = None
    return list(drawn)


def log_count(kind: NeedleType) -> float:
    """Returns the logarithm of how many keys or values of a kind there are: the NLL of a guess, in nats."""
    if kind == "words":
        nouns, adjectives, _ = word_lists()
        return math.log(len(nouns) * len(adjectives))
    return math.log(9 * 10 ** (_DIGITS - 1)) if kind == "numbers" else 122 * math.log(2)
