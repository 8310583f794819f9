"""Haystacks: filler text as a sequence of units (lines or words), of which a prompt contains the first ones.

A shorter haystack is therefore the beginning of a longer one. The tokens of every unit are counted once; the number of
units that fit into a number of tokens is then computed from these counts.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray


def running_totals(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the sums of the first n numbers for n = 0, 1, ..., int64 [numbers + 1]."""
    return np.concatenate(([0], np.cumsum(tokens)))


def most_within(totals: NDArray[np.int64], tokens: int) -> int:
    """Returns the largest n with `totals[n]` at most `tokens`, 0 if there is none; `totals` must be ascending."""
    return max(0, int(np.searchsorted(totals, tokens, side="right")) - 1)


class Haystack(ABC):
    """A sequence of units with known token counts.

    Attributes:
        inline: whether units are words of running text, each after a space, instead of separate lines.
    """

    inline: ClassVar[bool] = False

    @property
    def first_tokens(self) -> int:
        """Token count of the first unit at the very start of a body."""
        return self.tokens(1)

    @abstractmethod
    def tokens(self, units: int) -> int:
        """Returns the token count of the first `units` units."""

    @abstractmethod
    def units_within(self, tokens: int) -> int:
        """Returns the largest n for which the first n units have at most `tokens` tokens."""

    @abstractmethod
    def text(self, first: int, last: int) -> str:
        """Returns units `first` to `last` - 1 as they stand in the prompt."""

    def insertion(self, fraction: float, units: int) -> int:
        """Returns the index of the unit before which an insert goes.

        Args:
            fraction: relative depth of the insert, 0 to 1.
            units: number of units in the prompt.
        """
        return int(fraction * units)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseHaystack(Haystack):
    """A haystack of one repeated line; `line` includes its line break."""

    line: str
    line_tokens: int

    def tokens(self, units: int) -> int:
        """Returns the token count of the first `units` lines."""
        return units * self.line_tokens

    def units_within(self, tokens: int) -> int:
        """Returns the number of lines that fit."""
        return max(0, tokens) // self.line_tokens

    def text(self, first: int, last: int) -> str:
        """Returns lines `first` to `last` - 1."""
        return self.line * (last - first)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineHaystack(Haystack):
    """A haystack of lines from a pool, each used at most once.

    Attributes:
        pool: the lines with their line breaks.
        order: indices into the pool in the order of the haystack, int64 [lines].
        cumulative_tokens: `cumulative_tokens[n]` is the token count of the first n lines in that order, int64
            [lines + 1].
    """

    pool: Sequence[str]
    order: NDArray[np.int64]
    cumulative_tokens: NDArray[np.int64]

    def tokens(self, units: int) -> int:
        """Returns the token count of the first `units` lines."""
        return int(self.cumulative_tokens[units])

    def units_within(self, tokens: int) -> int:
        """Returns the number of lines that fit, at most all of them."""
        return most_within(self.cumulative_tokens, tokens)

    def text(self, first: int, last: int) -> str:
        """Returns lines `first` to `last` - 1."""
        pool = self.pool
        return "".join([pool[line] for line in self.order[first:last].tolist()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class EssayHaystack(Haystack):
    """A haystack of the words of essays; after the last word the first one follows; inserts go between sentences.

    Attributes:
        words: all words of the essays.
        cumulative_tokens: `cumulative_tokens[n]` is the token count of the first n words, each after a space, int64
            [words + 1].
        sentence_starts: indices of the words that begin a sentence, int64 [sentences], the first one 0.
        first_word_tokens: token count of the first word without a space before it.
    """

    inline: ClassVar[bool] = True
    words: Sequence[str]
    cumulative_tokens: NDArray[np.int64]
    sentence_starts: NDArray[np.int64]
    first_word_tokens: int

    @property
    def first_tokens(self) -> int:
        """Token count of the first word without a space before it."""
        return self.first_word_tokens

    def tokens(self, units: int) -> int:
        """Returns the token count of the first `units` words."""
        rounds, rest = divmod(units, len(self.words))
        return rounds * int(self.cumulative_tokens[-1]) + int(self.cumulative_tokens[rest])

    def units_within(self, tokens: int) -> int:
        """Returns the number of words that fit."""
        rounds, rest = divmod(max(0, tokens), int(self.cumulative_tokens[-1]))
        return rounds * len(self.words) + most_within(self.cumulative_tokens, rest)

    def text(self, first: int, last: int) -> str:
        """Returns words `first` to `last` - 1, each after a space."""
        parts: list[str] = []
        while first < last:
            start = first % len(self.words)
            stop = min(len(self.words), start + last - first)
            parts.append(" " + " ".join(self.words[start:stop]))
            first += stop - start
        return "".join(parts)

    def insertion(self, fraction: float, units: int) -> int:
        """Returns the index of the first word of the sentence before which an insert goes, or `units` for the end."""
        rounds, rest = divmod(units, len(self.words))
        sentences_in_rest = int(np.searchsorted(self.sentence_starts, rest, side="left"))
        sentence = int(fraction * (rounds * len(self.sentence_starts) + sentences_in_rest))
        full_rounds, sentence_of_round = divmod(sentence, len(self.sentence_starts))
        return min(units, full_rounds * len(self.words) + int(self.sentence_starts[sentence_of_round]))
