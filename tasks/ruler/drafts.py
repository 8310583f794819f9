"""Drafts: samples whose number of haystack units is not chosen yet, and the text around prompts (chat template).

A prompt is lengthened by units of filler text, the haystack: lines, words or documents. `sizes` chooses how many.
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.tasks.ruler.haystacks import Haystack, most_within
from sbeval.tasks.tokens import LINE_START, LINES, WORDS, TokenCounter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft(ABC):
    """One sample of any task, complete except for its number of haystack units.

    The prompt consists of opening, body, closing and answer prefix, in this order and without separators. The units
    make up the body.

    Attributes:
        references: the right answers.
        answer_prefix: the beginning of the answer, which the prompt may end with.
        opening: the text before the body, in segments that are counted separately.
        closing: the text after the body, with the question.
        least_units: smallest number of units for which the task is defined.
        most_units: number of units that exist, None if there is no bound.
    """

    references: Sequence[str]
    answer_prefix: str
    opening: Sequence[str]
    closing: str
    least_units: int
    most_units: int | None = None

    def body_ends(self) -> tuple[str, str]:
        """Returns short texts that stand for the start and the end of the body.

        They are tokenised together with the opening and the closing, whose token counts depend on the adjacent text.
        """
        return "A", "a.\n"

    def counted_segments(self) -> dict[tuple[str, str], list[str]]:
        """Returns the segments of text that only this sample has, so that many samples can be tokenised in one batch.

        The keys are pairs of texts; a segment is tokenised between both texts of its pair.
        """
        return {}

    @abstractmethod
    def body_tokens(self, units: int) -> int:
        """Returns the token count of a body with `units` units: the sum over its segments."""

    @abstractmethod
    def units_within(self, tokens: int) -> int:
        """Returns the largest number of units whose body has at most `tokens` tokens, 0 if not even one unit fits."""

    @abstractmethod
    def body(self, units: int) -> str:
        """Returns the body with `units` units."""

    def depths(self, units: int) -> tuple[list[int], list[float]]:
        """Returns the positions of the segments that the question is about: body tokens before each, and percents."""
        return [], []

    def cut_tokens(self, units: int) -> int:
        """Returns how many tokens of the sample's text its body with `units` units lacks; 0 for text made to fill."""
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListDraft(Draft):
    """A sample whose body is a list of items in random order; a unit is one item.

    Attributes:
        totals: `totals[n]` is the token count of the body with n units, int64.
        name: the seed of the order.
    """

    totals: NDArray[np.int64]
    name: tuple[object, ...]

    def body_tokens(self, units: int) -> int:
        """Returns the token count of a list with the first `units` items and their numbers."""
        return int(self.totals[units])

    def units_within(self, tokens: int) -> int:
        """Returns how many items fit."""
        return most_within(self.totals, tokens)


class Steps(NamedTuple):
    """The rule of NVIDIA's RULER scripts for the number of haystack units in a prompt.

    The scripts determine the number for the first sample. Every other sample starts with that number, and units are
    removed a step at a time until the prompt fits the context length.

    Attributes:
        units: number of units in a step.
        origin: the first sample has `origin` units plus a whole number of steps; None allows any number of units.
    """

    units: int
    origin: int | None = None

    def within(self, most: int, first: int) -> int:
        """Returns how many units the scripts put into a sample.

        At most `most` units fit this sample, and at most `first` units fit the first sample.
        """
        if self.origin is not None:
            first = self.origin + (first - self.origin) // self.units * self.units
        return first - max(0, -((most - first) // self.units)) * self.units


class Generator(ABC):
    """Makes the samples of one task.

    Args:
        options: the task's options.
        task: its name, which is part of every seed.
        counter: counts tokens with the model's tokenizer.
        generated_tokens: tokens of each context length that are reserved for the answer.

    Attributes:
        alike: whether samples need about equally many tokens. Samples made of texts of any length do not.
    """

    alike: ClassVar[bool] = True

    def __init__(self, options: Any, *, task: str, counter: TokenCounter, generated_tokens: int = 0) -> None:
        self.options = options
        self._name = (task, options.seed)
        self.counter = counter
        self.generated_tokens = generated_tokens

    @abstractmethod
    def draft(self, index: int, context_length: int) -> Draft:
        """Makes sample `index`.

        The sample depends only on task, seed and index. For those tasks in which RULER changes the sample with the
        context length, it also depends on the context length.
        """

    def available(self) -> int | None:
        """Returns how many samples exist, None if there is no bound."""
        return None

    def steps(self, length: int) -> Steps | None:
        """Returns NVIDIA's rule for filling prompts at a context length, None for a task that NVIDIA does not have."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Insert:
    """A text, such as a needle, that is inserted between the units of a haystack.

    Attributes:
        text: the inserted text. It ends with a line break if the haystack consists of lines. In running text it has no
            space at either end.
        fraction: its relative depth, 0 to 1.
        is_queried: whether the question is about it; its depth is then recorded.
    """

    text: str
    fraction: float
    is_queried: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class HaystackDraft(Draft):
    """A sample with inserts in a haystack: the needle tasks and variable tracking.

    Attributes:
        inserts: the inserted texts, in the order in which they stand in the prompt.
        apart: whether at least one haystack unit separates any two inserts.
    """

    haystack: Haystack
    inserts: Sequence[Insert]
    counter: TokenCounter
    apart: bool = False

    def body_ends(self) -> tuple[str, str]:
        """Returns short texts that stand for the body's start and end; the end is a word or, with lines, a line."""
        return "A", "a" if self.haystack.inline else "a.\n"

    def body_tokens(self, units: int) -> int:
        """Returns the token count of haystack and inserts."""
        tokens = self.haystack.tokens(units) + sum(self._insert_tokens)
        if not self.haystack.inline:
            return tokens
        if self.inserts and self.positions(units)[0] == 0:
            first = int(self.counter.count_segments([self.inserts[0].text], LINE_START)[0])
            return tokens + first - self._insert_tokens[0]
        return tokens + self.haystack.first_tokens - self.haystack.tokens(1)

    def counted_segments(self) -> dict[tuple[str, str], list[str]]:
        """Returns the inserted texts; the key is the pair of texts between which they are tokenised."""
        if not self.haystack.inline:
            return {LINES: [insert.text for insert in self.inserts]}
        texts = [insert.text for insert in self.inserts]
        return {WORDS: [" " + text for text in texts], LINE_START: texts[:1]}

    @functools.cached_property
    def _insert_tokens(self) -> list[int]:
        """Token count of each insert inside the body."""
        between, segments = next(iter(self.counted_segments().items()))
        return [int(tokens) for tokens in self.counter.count_segments(segments, between)]

    def units_within(self, tokens: int) -> int:
        """Returns the largest number of haystack units that fit together with the inserts into `tokens` tokens."""
        units = self.haystack.units_within(tokens - sum(self._insert_tokens) + 1)
        while units > 0 and self.body_tokens(units) > tokens:
            units -= 1
        return units

    def positions(self, units: int) -> list[int]:
        """Returns the index of the haystack unit before which each insert goes, ascending."""
        positions = [self.haystack.insertion(insert.fraction, units) for insert in self.inserts]
        if not self.apart:
            return positions
        count = len(positions)
        for i in range(1, count):
            positions[i] = max(positions[i], positions[i - 1] + 1)
        return [min(position, max(0, units - count + i)) for i, position in enumerate(positions)]

    def body(self, units: int) -> str:
        """Returns the first `units` units of the haystack with the inserts."""
        return with_inserts(self.haystack, self.inserts, self.positions(units), units)

    def depths(self, units: int) -> tuple[list[int], list[float]]:
        """Returns the depths of the inserts that the question is about: body tokens before each, and percents."""
        tokens: list[int] = []
        percents: list[float] = []
        inserted = 0
        for insert, position, count in zip(self.inserts, self.positions(units), self._insert_tokens, strict=True):
            if insert.is_queried:
                tokens.append(self.haystack.tokens(position) + inserted)
                percents.append(round(100 * insert.fraction, 6))
            inserted += count
        return tokens, percents


def with_inserts(haystack: Haystack, inserts: Sequence[Insert], positions: Sequence[int], units: int) -> str:
    """Returns the first `units` units of a haystack, with each insert before the unit at its position."""
    segments: list[str] = []
    space = " " if haystack.inline else ""
    last = 0
    for insert, position in zip(inserts, positions, strict=True):
        segments += [haystack.text(last, position), space + insert.text]
        last = position
    return "".join([*segments, haystack.text(last, units)]).removeprefix(space)


PROMPT_MARK, PREFIX_MARK = "\ue000prompt\ue000", "\ue000prefix\ue000"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The text that system prompt and chat template put around a task's prompt.

    Without both it is only the space between the question and the answer prefix (the start of the answer, with which
    the prompt may end).

    Attributes:
        head: the text before the prompt.
        middle: the text between the question and the answer prefix.
        tail: the text after the answer prefix.
        prefixed: whether there is an answer prefix.
    """

    head: str = ""
    middle: str = " "
    tail: str = ""
    prefixed: bool = True

    def end(self, draft: Draft) -> str:
        """Returns the text after the body: the draft's closing, then the text around and in the answer prefix."""
        return draft.closing + self.middle + (draft.answer_prefix if self.prefixed else "") + self.tail


def prompt_text(draft: Draft, units: int, frame: Frame) -> str:
    """Returns the whole prompt of a sample with `units` haystack units, with the text of `frame` around it."""
    return "".join([frame.head, *draft.opening, draft.body(units), frame.end(draft)])


def rendered_frame(render: Callable[[str | None], str], *, prefixed: bool, behind: bool) -> Frame:
    """Returns the text that a chat template puts around a prompt.

    A mark is rendered in place of the prompt and another one in place of the answer's start; the result is split there.

    Args:
        render: renders the message `PROMPT_MARK`; its argument is the start of the model's answer, None for no start.
        prefixed: whether the prompt ends with the start of the answer.
        behind: whether the start of the answer comes after the model's thinking; the template then does not render it.

    Raises:
        UserError: the rendered text does not contain each mark exactly once.
    """
    marks = [PROMPT_MARK, PREFIX_MARK] if prefixed and not behind else [PROMPT_MARK]
    text = render(PREFIX_MARK if len(marks) > 1 else None)
    if any(text.count(mark) != 1 for mark in marks):
        parts = (
            "the user's message and the start of the answer once each" if len(marks) > 1 else "the user's message once"
        )
        counts = " and ".join(str(text.count(mark)) for mark in marks)
        remedy = "run without --apply_chat_template"
        raise UserError(f"Expected the chat template to render {parts}, found {counts}; {remedy}.")
    head, middle = text.split(PROMPT_MARK)
    middle, _, tail = middle.partition(PREFIX_MARK)
    return Frame(head=head, middle=middle, tail=tail, prefixed=prefixed)
