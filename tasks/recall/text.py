"""Probes written as text: where the answers' tokens are is read from the tokenizer's offsets."""

from abc import abstractmethod
from typing import NamedTuple

import numpy as np

from sbeval.errors import UserError
from sbeval.scoring.requests import TargetSequence
from sbeval.tasks.recall.task import Asked, Condition, RecallTask
from sbeval.tasks.tokens import TokenCounter, load_counter

_CHARACTERS_PER_EVENT = 20


class Passage(NamedTuple):
    """A text and its answers.

    Attributes:
        text: the text.
        spans: first and last + 1 character of each answer, ascending.
    """

    text: str
    spans: list[tuple[int, int]]


class TokenizedRecallTask(RecallTask):
    """A probe that depends on the model's tokenizer.

    Attributes:
        default_lengths: context lengths where none are asked for.
    """

    default_lengths: tuple[int, ...]
    counter: TokenCounter

    def prepare(self, name: str) -> None:
        """Reads the tokenizer, and makes the first sample in every condition, to refuse impossible settings early."""
        metadata = self.config.metadata
        self.counter = load_counter(metadata, name)
        self.use_tokenizer(name)
        lengths, _ = self.options.lengths_of(name, self.default_lengths, metadata.get("pretrained"))
        self.all_conditions = [condition for length in lengths for condition in self.conditions(length)]
        for condition in self.all_conditions:
            self.asked(0, condition)

    @abstractmethod
    def use_tokenizer(self, name: str) -> None:
        """Prepares what depends on the tokenizer alone."""

    def conditions(self, length: int) -> list[Condition]:
        """Returns the conditions at a length."""
        return [Condition(length)]

    def tokenizer_sha256(self) -> str:
        """Returns the hash of the tokenizer."""
        return self.counter.sha256


class TextRecallTask(TokenizedRecallTask):
    """A probe whose sequences are the first L tokens of an endless text."""

    def use_tokenizer(self, name: str) -> None:
        """Refuses a tokenizer without character offsets."""
        if not self.counter.tokenizer.is_fast:
            raise UserError(f"{name} needs a tokenizer that tells character offsets; give a fast one.")

    @abstractmethod
    def passages(self, index: int, condition: Condition, events: int) -> list[Passage]:
        """Writes texts of `events` events with the same answers; those with fewer events are their beginnings."""

    def asked(self, index: int, condition: Condition) -> list[Asked]:
        """Tokenises enough text, cuts it to the length, and finds the answers.

        Raises:
            UserError: no answer lies within the length.
        """
        length = condition.context_length
        events = max(1, length * 2 // _CHARACTERS_PER_EVENT)
        while True:
            found = [self._tokenised(passage, length) for passage in self.passages(index, condition, events)]
            if all(one is not None for one in found):
                break
            events *= 2
        asked = [one for one in found if one is not None]
        answers = min(len(one.answer_tokens) for one in asked)
        if not answers:
            raise UserError(
                f"{self.config.task} asks for nothing within {length} tokens with {condition.pairs or 1} pairs; use a "
                "longer context length or fewer pairs."
            )
        return [one.first(answers) for one in asked]

    def _tokenised(self, passage: Passage, length: int) -> Asked | None:
        """Returns the first `length` tokens with the answers in them, None where the text has fewer tokens."""
        tokens, starts, stops = self.counter.encode_with_offsets(passage.text)
        if len(tokens) <= length:
            return None
        places: list[int] = []
        counts: list[int] = []
        for first, last in passage.spans:
            own = np.flatnonzero((stops > first) & (starts < last))
            if own[-1] > length:
                break
            places += (own - 1).tolist()
            counts.append(len(own))
        positions = np.array(places, dtype=np.int64)
        return Asked(
            TargetSequence(tokens[:length], positions, tokens[positions + 1]), np.array(counts, dtype=np.int64)
        )
