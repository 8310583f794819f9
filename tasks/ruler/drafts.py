"""A sample before it is fitted to a length: everything but how much haystack it gets."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from sbeval.tasks.ruler.haystacks import Haystack


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Insert:
    """Text put into a haystack at a relative depth.

    Attributes:
        text: the text with its line break, or, in running text, without a space at either side.
        tokens: its tokens at that place.
        fraction: relative depth, 0 to 1.
        asked: whether the question is about it; its depth is then recorded.
    """

    text: str
    tokens: int
    fraction: float
    asked: bool


class Draft(Protocol):
    """One sample of any task, open only in its number of units.

    Attributes:
        references: what the answer is compared with.
        answer_prefix: how the answer starts; part of the prompt.
        opening: pieces before the units.
        closing: the piece after them, up to the answer prefix.
        least_units: fewest units the task is defined for.
        most_units: most units there are, None without a bound.
    """

    @property
    def references(self) -> Sequence[str]: ...
    @property
    def answer_prefix(self) -> str: ...
    @property
    def opening(self) -> Sequence[str]: ...
    @property
    def closing(self) -> str: ...
    @property
    def least_units(self) -> int: ...
    @property
    def most_units(self) -> int | None: ...

    def body_tokens(self, units: int) -> int:
        """Returns the tokens of the body with `units` units, as the sum over its pieces."""
        ...

    def units_within(self, tokens: int) -> int:
        """Returns the most units whose body has at most `tokens` tokens."""
        ...

    def body(self, units: int) -> str:
        """Returns the body."""
        ...

    def depths(self, units: int) -> tuple[list[int], list[float]]:
        """Returns, for every piece the question is about, body tokens before it and its depth in percent."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HaystackDraft:
    """Inserts in a haystack: the needle tasks and variable tracking.

    Attributes:
        haystack: where the inserts go.
        inserts: ordered by relative depth.
        apart: whether two inserts have at least one unit between them.
    """

    references: Sequence[str]
    answer_prefix: str
    opening: Sequence[str]
    closing: str
    haystack: Haystack
    inserts: Sequence[Insert]
    least_units: int
    most_units: int | None = None
    apart: bool = False

    def body_tokens(self, units: int) -> int:
        """Returns the tokens of haystack and inserts."""
        return self.haystack.tokens(units) + sum(insert.tokens for insert in self.inserts)

    def units_within(self, tokens: int) -> int:
        """Returns how many haystack units fit beside the inserts."""
        return self.haystack.units_within(tokens - sum(insert.tokens for insert in self.inserts))

    def positions(self, units: int) -> list[int]:
        """Returns before which haystack unit each insert goes, ascending."""
        wanted = [self.haystack.insertion(insert.fraction, units) for insert in self.inserts]
        if not self.apart:
            return wanted
        count = len(wanted)
        for i in range(1, count):
            wanted[i] = max(wanted[i], wanted[i - 1] + 1)
        for i in range(count):
            wanted[i] = min(wanted[i], max(0, units - count + i))
        return wanted

    def body(self, units: int) -> str:
        """Returns the haystack with its inserts."""
        parts: list[str] = []
        space = " " if self.haystack.inline else ""
        last = 0
        for insert, position in zip(self.inserts, self.positions(units), strict=True):
            parts.append(self.haystack.text(last, position))
            parts.append(space + insert.text)
            last = position
        parts.append(self.haystack.text(last, units))
        text = "".join(parts)
        return text[1:] if space else text

    def depths(self, units: int) -> tuple[list[int], list[float]]:
        """Returns token and percent depths of the inserts the question is about."""
        tokens: list[int] = []
        percents: list[float] = []
        inserted = 0
        for insert, position in zip(self.inserts, self.positions(units), strict=True):
            if insert.asked:
                tokens.append(self.haystack.tokens(position) + inserted)
                percents.append(round(100 * insert.fraction, 6))
            inserted += insert.tokens
        return tokens, percents
