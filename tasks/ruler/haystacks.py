"""Haystacks: endless sequences of units of text, of which a prompt takes the first few.

A haystack at a shorter length is the beginning of the one at a longer length. Units are counted once; how many of them
fit a number of tokens is then arithmetic.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Haystack(Protocol):
    """A sequence of units with known token counts.

    Attributes:
        inline: units stand in running text, each behind a space, instead of on lines of their own.
    """

    inline: bool

    def tokens(self, units: int) -> int:
        """Returns the tokens of the first `units` units."""
        ...

    def units_within(self, tokens: int) -> int:
        """Returns the most first units that together have at most `tokens` tokens."""
        ...

    def text(self, first: int, last: int) -> str:
        """Returns units `first` to `last` - 1 as they stand in the prompt."""
        ...

    def insertion(self, fraction: float, units: int) -> int:
        """Returns before which of the first `units` units an insert at a relative depth of 0 to 1 goes."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoiseHaystack:
    """The same line over and over.

    Attributes:
        line: the line with its line break.
        line_tokens: its tokens.
    """

    line: str
    line_tokens: int
    inline: bool = False

    def tokens(self, units: int) -> int:
        """Returns the tokens of the first `units` lines."""
        return units * self.line_tokens

    def units_within(self, tokens: int) -> int:
        """Returns how many lines fit."""
        return max(0, tokens) // self.line_tokens

    def text(self, first: int, last: int) -> str:
        """Returns the lines."""
        return self.line * (last - first)

    def insertion(self, fraction: float, units: int) -> int:
        """Returns the line an insert goes before."""
        return int(fraction * units)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LineHaystack:
    """Lines drawn from a pool, each at most once.

    Attributes:
        pool: the lines with their line breaks.
        order: which line comes when, int64 [lines].
        cumulative_tokens: tokens of the first n lines in that order, int64 [lines + 1], from 0.
    """

    pool: Sequence[str]
    order: NDArray[np.int64]
    cumulative_tokens: NDArray[np.int64]
    inline: bool = False

    def tokens(self, units: int) -> int:
        """Returns the tokens of the first `units` lines."""
        return int(self.cumulative_tokens[units])

    def units_within(self, tokens: int) -> int:
        """Returns how many lines fit, at most all of them."""
        return max(0, int(np.searchsorted(self.cumulative_tokens, tokens, side="right")) - 1)

    def text(self, first: int, last: int) -> str:
        """Returns the lines."""
        pool = self.pool
        return "".join([pool[line] for line in self.order[first:last].tolist()])

    def insertion(self, fraction: float, units: int) -> int:
        """Returns the line an insert goes before."""
        return int(fraction * units)
