"""A sample before its length is known, and the whole prompt around it: system text and chat template."""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.tasks.ruler.haystacks import Haystack, most_within
from sbeval.tasks.tokens import LINE_START, LINES, WORDS, TokenCounter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft(ABC):
    """One sample of any task, open only in its number of units.

    The prompt is opening, body, closing and answer prefix, each placed directly behind the other.

    Attributes:
        least_units: fewest units the task is defined for.
        most_units: most units there are, None without a bound.
    """

    references: Sequence[str]
    answer_prefix: str
    opening: Sequence[str]
    closing: str
    least_units: int
    most_units: int | None = None

    def body_ends(self) -> tuple[str, str]:
        """Returns what stands for the body's beginning and its end when opening and closing are counted."""
        return "A", "a.\n"

    def counted_pieces(self) -> dict[tuple[str, str], list[str]]:
        """Returns pieces of this sample alone, by what stands around them, so that many samples are counted at once."""
        return {}

    @abstractmethod
    def body_tokens(self, units: int) -> int:
        """Returns the tokens of the body with `units` units, as the sum over its pieces."""

    @abstractmethod
    def units_within(self, tokens: int) -> int:
        """Returns the most units whose body has at most `tokens` tokens, 0 where none do."""

    @abstractmethod
    def body(self, units: int) -> str:
        """Returns the body."""

    def depths(self, units: int) -> tuple[list[int], list[float]]:
        """Returns, for every piece the question is about, body tokens before it and its depth in percent."""
        return [], []


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListDraft(Draft):
    """A list in random order, whose units are its items.

    Attributes:
        totals: tokens of the body with n units, int64, from n = 0.
        name: seeds the order.
    """

    totals: NDArray[np.int64]
    name: tuple[object, ...]

    def body_tokens(self, units: int) -> int:
        """Returns the tokens of the first items and their numbers."""
        return int(self.totals[units])

    def units_within(self, tokens: int) -> int:
        """Returns how many items fit."""
        return most_within(self.totals, tokens)


class Steps(NamedTuple):
    """How NVIDIA's scripts fill prompts: all samples begin with the units of the first, and go down in steps.

    The first sample's units are `origin` and a whole number of steps; with None they are any number.
    """

    units: int
    origin: int | None = None

    def within(self, most: int, first: int) -> int:
        """Returns the units of a sample that has room for `most`, where the first sample has room for `first`."""
        if self.origin is not None:
            first = self.origin + (first - self.origin) // self.units * self.units
        return first - max(0, -((most - first) // self.units)) * self.units


class Generator(ABC):
    """Makes the samples of one task.

    Args:
        task: its name, part of every seed.
        generated_tokens: tokens of each length kept free for the answer.
    """

    def __init__(self, options: Any, *, task: str, counter: TokenCounter, generated_tokens: int = 0) -> None:
        self.options = options
        self._name = (task, options.seed)
        self.counter = counter
        self.generated_tokens = generated_tokens

    @abstractmethod
    def draft(self, index: int, context_length: int) -> Draft:
        """Makes sample `index`, which depends on task, seed and index, and on the length where RULER says so."""

    def available(self) -> int | None:
        """Returns how many samples there are, None without a bound."""
        return None

    def steps(self, length: int) -> Steps | None:
        """Returns in which steps NVIDIA's scripts shorten prompts of a length, None for a task that is not theirs."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Insert:
    """Text put into a haystack at a relative depth, 0 to 1, which is recorded if the question is about it.

    It ends with its line break; in running text it has no space at either side.
    """

    text: str
    fraction: float
    asked: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class HaystackDraft(Draft):
    """Inserts in a haystack: the needle tasks and variable tracking.

    Attributes:
        inserts: in the order they stand in.
        apart: whether two inserts have at least one unit between them.
    """

    haystack: Haystack
    inserts: Sequence[Insert]
    counter: TokenCounter
    apart: bool = False

    def body_ends(self) -> tuple[str, str]:
        """Returns a word for the end where the haystack is running text, else a line."""
        return "A", "a" if self.haystack.inline else "a.\n"

    def body_tokens(self, units: int) -> int:
        """Returns the tokens of haystack and inserts."""
        tokens = self.haystack.tokens(units) + sum(self._insert_tokens)
        if not self.haystack.inline:
            return tokens
        if self.inserts and self.positions(units)[0] == 0:
            first = int(self.counter.count_pieces([self.inserts[0].text], LINE_START)[0])
            return tokens + first - self._insert_tokens[0]
        return tokens + self.haystack.first_tokens - self.haystack.tokens(1)

    def counted_pieces(self) -> dict[tuple[str, str], list[str]]:
        """Returns the inserts as they are counted."""
        if not self.haystack.inline:
            return {LINES: [insert.text for insert in self.inserts]}
        texts = [insert.text for insert in self.inserts]
        return {WORDS: [" " + text for text in texts], LINE_START: texts[:1]}

    @functools.cached_property
    def _insert_tokens(self) -> list[int]:
        """Tokens of each insert inside the body."""
        between, pieces = next(iter(self.counted_pieces().items()))
        return [int(tokens) for tokens in self.counter.count_pieces(pieces, between)]

    def units_within(self, tokens: int) -> int:
        """Returns how many haystack units fit beside the inserts."""
        units = self.haystack.units_within(tokens - sum(self._insert_tokens) + 1)
        while units > 0 and self.body_tokens(units) > tokens:
            units -= 1
        return units

    def positions(self, units: int) -> list[int]:
        """Returns before which haystack unit each insert goes, ascending."""
        wanted = [self.haystack.insertion(insert.fraction, units) for insert in self.inserts]
        if not self.apart:
            return wanted
        count = len(wanted)
        for i in range(1, count):
            wanted[i] = max(wanted[i], wanted[i - 1] + 1)
        return [min(position, max(0, units - count + i)) for i, position in enumerate(wanted)]

    def body(self, units: int) -> str:
        """Returns the haystack with its inserts."""
        return with_inserts(self.haystack, self.inserts, self.positions(units), units)

    def depths(self, units: int) -> tuple[list[int], list[float]]:
        """Returns token and percent depths of the inserts the question is about."""
        tokens: list[int] = []
        percents: list[float] = []
        inserted = 0
        for insert, position, count in zip(self.inserts, self.positions(units), self._insert_tokens, strict=True):
            if insert.asked:
                tokens.append(self.haystack.tokens(position) + inserted)
                percents.append(round(100 * insert.fraction, 6))
            inserted += count
        return tokens, percents


def with_inserts(haystack: Haystack, inserts: Sequence[Insert], positions: Sequence[int], units: int) -> str:
    """Returns the first `units` units of a haystack, with inserts before the units at some positions."""
    pieces: list[str] = []
    space = " " if haystack.inline else ""
    last = 0
    for insert, position in zip(inserts, positions, strict=True):
        pieces += [haystack.text(last, position), space + insert.text]
        last = position
    return "".join([*pieces, haystack.text(last, units)]).removeprefix(space)


PROMPT_MARK, PREFIX_MARK = "\ue000prompt\ue000", "\ue000prefix\ue000"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What stands around a prompt: system text and chat template, or only the space before the answer prefix.

    Attributes:
        middle: between the question and the answer prefix.
        prefixed: whether there is such a prefix.
    """

    head: str = ""
    middle: str = " "
    tail: str = ""
    prefixed: bool = True

    def end(self, draft: Draft) -> str:
        """Returns what follows the body."""
        return draft.closing + self.middle + (draft.answer_prefix if self.prefixed else "") + self.tail


def prompt_text(draft: Draft, units: int, frame: Frame) -> str:
    """Returns the whole prompt."""
    return "".join([frame.head, *draft.opening, draft.body(units), frame.end(draft)])


def rendered_frame(render: Callable[[str | None], str], *, prefixed: bool, behind: bool) -> Frame:
    """Returns what a template puts around a prompt, by rendering marks in its place and cutting there.

    `render` goes from the start of an answer to the text of a message that is `PROMPT_MARK` and that start. A start
    `behind` what the model thinks is none of the template's.

    Raises:
        UserError: the template does not show each of them once.
    """
    marks = [PROMPT_MARK, PREFIX_MARK] if prefixed and not behind else [PROMPT_MARK]
    text = render(PREFIX_MARK if len(marks) > 1 else None)
    if any(text.count(mark) != 1 for mark in marks):
        shown = (
            "the user's message and the start of the answer once each" if len(marks) > 1 else "the user's message once"
        )
        counts = " and ".join(str(text.count(mark)) for mark in marks)
        remedy = "run without --apply_chat_template"
        raise UserError(f"Expected the chat template to show {shown}, found {counts}; {remedy}.")
    head, middle = text.split(PROMPT_MARK)
    middle, _, tail = middle.partition(PREFIX_MARK)
    return Frame(head=head, middle=middle, tail=tail, prefixed=prefixed)
