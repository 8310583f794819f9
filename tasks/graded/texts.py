"""Lines of filler text and of needles, of which haystacks are made; all words are wonderwords' (`tasks/draws.py`)."""

import functools
import random
import string
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.tasks.draws import distinct, seeded_order, seeded_random, short_nouns, word_lists

BLOCK_LINES = 4096
MOST_BLOCKS = 32
LEAST_LINE_TOKENS = 8
"""Lower bound for the tokens of a line, so that a pool of lines fills a length."""
_QUERIED_ADJECTIVES, _QUERIED_NOUNS = 64, 256
_PASSWORD_WORDS = 4


@functools.cache
def short_adjectives() -> list[str]:
    """Returns wonderwords' adjectives that consist of 4 to 9 lower-case letters."""
    _, adjectives, _ = word_lists()
    return [word for word in adjectives if 4 <= len(word) <= 9 and set(word) <= set(string.ascii_lowercase)]


class Vocabulary(NamedTuple):
    """Adjectives and nouns of keys, divided so that no line of a haystack shares a word with a queried key.

    Attributes:
        queried_adjectives: adjectives of keys that questions are about.
        queried_nouns: nouns of such keys.
        adjectives: all other adjectives.
        nouns: all other nouns.
    """

    queried_adjectives: Sequence[str]
    queried_nouns: Sequence[str]
    adjectives: Sequence[str]
    nouns: Sequence[str]


def vocabulary(*name: object) -> Vocabulary:
    """Divides the words of keys; `name` is the seed."""
    adjectives, nouns = (
        [words[i] for i in seeded_order(len(words), *name, kind).tolist()]
        for kind, words in (("adjectives", short_adjectives()), ("nouns", short_nouns()))
    )
    return Vocabulary(
        adjectives[:_QUERIED_ADJECTIVES],
        nouns[:_QUERIED_NOUNS],
        adjectives[_QUERIED_ADJECTIVES:],
        nouns[_QUERIED_NOUNS:],
    )


def blocks_for(context_length: int) -> int:
    """Returns how many blocks of lines fill a context length in tokens, at most `MOST_BLOCKS`."""
    return min(MOST_BLOCKS, 1 + context_length // (LEAST_LINE_TOKENS * BLOCK_LINES))


def filler_lines(words: Vocabulary, block: int, *name: object) -> list[str]:
    """Returns a block of lines without needles, each with its line break."""
    rng = seeded_random(*name, "filler", block)

    def thing() -> str:
        return f"{rng.choice(words.adjectives)} {rng.choice(words.nouns)}"

    return [f"The {thing()} stands beside the {thing()}.\n" for _ in range(BLOCK_LINES)]


def needle_lines(words: Vocabulary, block: int, *name: object) -> list[str]:
    """Returns a block of needles with different keys, also from those of other blocks, each with its line break."""
    rng = seeded_random(*name, "other needles", block)
    # the keys of a block have its own share of the nouns
    nouns = words.nouns[block::MOST_BLOCKS]
    keys = distinct(BLOCK_LINES, lambda: f"{rng.choice(words.adjectives)}-{rng.choice(nouns)}")
    return [f"{needle(key, password(rng))}\n" for key in keys]


def needle(key: str, value: str) -> str:
    """Returns the sentence that holds a value."""
    return f"The password of {key} is {value}."


def password(rng: random.Random) -> str:
    """Draws a value: four different nouns."""
    return " ".join(rng.sample(short_nouns(), _PASSWORD_WORDS))


def line_order(blocks: int, *name: object) -> NDArray[np.int64]:
    """Returns the order of a haystack's lines, shuffled within each block, int64 [blocks x `BLOCK_LINES`].

    The order of fewer blocks is therefore the beginning of that of more blocks.
    """
    orders = [block * BLOCK_LINES + seeded_order(BLOCK_LINES, *name, "haystack", block) for block in range(blocks)]
    return np.concatenate(orders)
