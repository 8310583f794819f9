"""Haystacks: sequences of units of text, of which a prompt takes the first few.

A haystack at a shorter length is the beginning of the one at a longer length. Units are counted once; how many of them
fit a number of tokens is then arithmetic.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray


def running_totals(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the sum of the first n numbers, from n = 0, int64 [numbers + 1]."""
    return np.concatenate(([0], np.cumsum(tokens)))


def most_within(totals: NDArray[np.int64], tokens: int) -> int:
    """Returns the largest place of running totals that is at most `tokens`, 0 where none is."""
    return max(0, int(np.searchsorted(totals, tokens, side="right")) - 1)


class Haystack(ABC):
    """A sequence of units with known token counts.

    Attributes:
        inline: units stand in running text, each behind a space, instead of on lines of their own.
    """

    inline: ClassVar[bool] = False

    @property
    def first_tokens(self) -> int:
        """Tokens of the first unit at the very start of a body."""
        return self.tokens(1)

    @abstractmethod
    def tokens(self, units: int) -> int:
        """Returns the tokens of the first `units` units."""

    @abstractmethod
    def units_within(self, tokens: int) -> int:
        """Returns the most first units that together have at most `tokens` tokens."""

    @abstractmethod
    def text(self, first: int, last: int) -> str:
        """Returns units `first` to `last` - 1 as they stand in the prompt."""

    def insertion(self, fraction: float, units: int) -> int:
        """Returns before which of the first `units` units an insert at a relative depth of 0 to 1 goes."""
        return int(fraction * units)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseHaystack(Haystack):
    """The same line, with its line break, over and over."""

    line: str
    line_tokens: int

    def tokens(self, units: int) -> int:
        """Returns the tokens of the first `units` lines."""
        return units * self.line_tokens

    def units_within(self, tokens: int) -> int:
        """Returns how many lines fit."""
        return max(0, tokens) // self.line_tokens

    def text(self, first: int, last: int) -> str:
        """Returns the lines."""
        return self.line * (last - first)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineHaystack(Haystack):
    """Lines drawn from a pool, each at most once.

    Attributes:
        pool: the lines with their line breaks.
        order: which line comes when, int64 [lines].
        cumulative_tokens: tokens of the first n lines in that order, int64 [lines + 1], from 0.
    """

    pool: Sequence[str]
    order: NDArray[np.int64]
    cumulative_tokens: NDArray[np.int64]

    def tokens(self, units: int) -> int:
        """Returns the tokens of the first `units` lines."""
        return int(self.cumulative_tokens[units])

    def units_within(self, tokens: int) -> int:
        """Returns how many lines fit, at most all of them."""
        return most_within(self.cumulative_tokens, tokens)

    def text(self, first: int, last: int) -> str:
        """Returns the lines."""
        pool = self.pool
        return "".join([pool[line] for line in self.order[first:last].tolist()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class EssayHaystack(Haystack):
    """The words of some essays, from the beginning, and again where they run out; inserts go between sentences.

    Attributes:
        cumulative_tokens: tokens of the first n words, each behind a space, int64 [words + 1], from 0.
        sentence_starts: words that begin a sentence, int64 [sentences], from 0.
        first_word_tokens: tokens of the first word without a space before it.
    """

    inline: ClassVar[bool] = True
    words: Sequence[str]
    cumulative_tokens: NDArray[np.int64]
    sentence_starts: NDArray[np.int64]
    first_word_tokens: int

    @property
    def first_tokens(self) -> int:
        """Tokens of the first word without a space before it."""
        return self.first_word_tokens

    def tokens(self, units: int) -> int:
        """Returns the tokens of the first `units` words."""
        rounds, rest = divmod(units, len(self.words))
        return rounds * int(self.cumulative_tokens[-1]) + int(self.cumulative_tokens[rest])

    def units_within(self, tokens: int) -> int:
        """Returns how many words fit."""
        rounds, rest = divmod(max(0, tokens), int(self.cumulative_tokens[-1]))
        return rounds * len(self.words) + most_within(self.cumulative_tokens, rest)

    def text(self, first: int, last: int) -> str:
        """Returns the words, each behind a space."""
        parts: list[str] = []
        while first < last:
            start = first % len(self.words)
            stop = min(len(self.words), start + last - first)
            parts.append(" " + " ".join(self.words[start:stop]))
            first += stop - start
        return "".join(parts)

    def insertion(self, fraction: float, units: int) -> int:
        """Returns the first word of the sentence an insert goes before, or `units` for the very end."""
        rounds, rest = divmod(units, len(self.words))
        in_rest = int(np.searchsorted(self.sentence_starts, rest, side="left"))
        sentence = int(fraction * (rounds * len(self.sentence_starts) + in_rest))
        whole, part = divmod(sentence, len(self.sentence_starts))
        return min(units, whole * len(self.words) + int(self.sentence_starts[part]))
