"""Probes written as text: where the answers' tokens are is read from the tokenizer's offsets."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from sbeval.errors import UserError
from sbeval.target_logprobs import TargetSequence
from sbeval.tasks.recall.task import Asked, Cell, RecallTask
from sbeval.tasks.ruler.options import context_lengths, whole_number
from sbeval.tasks.ruler.tokens import TokenCounter, load_counter

_CHARACTERS_PER_EVENT = 20


class Passage(NamedTuple):
    """A text and its answers.

    Attributes:
        text: the text.
        spans: first and last + 1 character of each answer, ascending.
    """

    text: str
    spans: list[tuple[int, int]]


class TextRecallTask(RecallTask):
    """A probe whose sequences are the first L tokens of an endless text.

    Attributes:
        default_lengths: context lengths where none are asked for.
    """

    default_lengths: tuple[int, ...]
    counter: TokenCounter

    def prepare(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Reads options and tokenizer."""
        self.num_samples = whole_number(metadata, "num_samples", 100, least=1)
        self.seed = whole_number(metadata, "seed", 42, least=0)
        self.counter = load_counter(metadata, name)
        if not self.counter.tokenizer.is_fast:
            raise UserError(f"{name} needs a tokenizer that tells character offsets; give a fast one.")
        lengths, _ = context_lengths(metadata, name, self.default_lengths)
        self.cells = [cell for length in lengths for cell in self.conditions(length)]
        for cell in self.cells:
            self.asked(0, cell)

    def conditions(self, length: int) -> list[Cell]:
        """Returns the conditions at a length."""
        return [Cell(length)]

    @abstractmethod
    def passage(self, index: int, cell: Cell, events: int) -> Passage:
        """Writes a text of `events` events; one with fewer is its beginning."""

    def tokenizer_sha256(self) -> str:
        """Returns the hash of the tokenizer."""
        return self.counter.sha256

    def asked(self, index: int, cell: Cell) -> list[Asked]:
        """Tokenises enough text, cuts it to the length, and finds the answers.

        Raises:
            UserError: no answer lies within the length.
        """
        length = cell.context_length
        events = max(1, length * 2 // _CHARACTERS_PER_EVENT)
        while True:
            passage = self.passage(index, cell, events)
            tokens, starts, stops = self.counter.encode_with_offsets(passage.text)
            if len(tokens) > length:
                break
            events *= 2
        positions, counts = [], []
        for first, last in passage.spans:
            own = np.flatnonzero((stops > first) & (starts < last))
            if own[-1] > length:
                break
            positions.append(own - 1)
            counts.append(len(own))
        if not positions:
            raise UserError(
                f"{self.config.task} asks for nothing within {length} tokens with {cell.pairs or 1} pairs; use a "
                "longer context length or fewer pairs."
            )
        places = np.concatenate(positions)
        return [Asked(TargetSequence(tokens[:length], places, tokens[places + 1]), np.array(counts))]
