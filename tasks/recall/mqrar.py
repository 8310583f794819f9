"""Multi-query repeated associative recall: over a vocabulary of its own, and as text for pretrained models."""

import itertools
import json
import random
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.scoring.requests import TargetSequence
from sbeval.tasks.draws import seeded_random, word_lists
from sbeval.tasks.recall.sequences import LENGTH_TOKENS, PAIRS, VOCABULARY, Mqrar, with_other_values
from sbeval.tasks.recall.task import Asked, Cell, RecallTask
from sbeval.tasks.recall.text import Passage, TextRecallTask
from sbeval.tasks.ruler.options import context_lengths, whole_number

VALUE_DIGITS = 4
TEXT_PAIRS = (4, 16)
TEXT_LENGTHS = (1024, 2048, 4096, 8192, 16384)


def counts(metadata: Mapping[str, Any], key: str, default: Sequence[int]) -> tuple[int, ...]:
    """Reads a number or a list of numbers, all of at least 1, ascending.

    Raises:
        UserError: the value is something else.
    """
    asked = metadata.get(key)
    listed = list(default) if asked is None else [asked] if isinstance(asked, int) else asked
    if not isinstance(listed, list | tuple) or not listed or any(type(n) is not int or n < 1 for n in listed):
        raise UserError(f"Expected {key} to be a list of whole numbers of at least 1, found {asked!r}.")
    return tuple(sorted(set(listed)))


class WithRetrievalGain(RecallTask):
    """Asks every question twice: behind the values it is about, and behind other values in their place.

    Beside the metrics of all recall tasks, `retrieval_gain` is by how much the answers' negative log-likelihood rises
    when their values do not stand in the text, in nats.
    """

    def score(self, cell: Cell, answers: Sequence[tuple[NDArray[np.float64], NDArray[np.bool_]]]) -> dict[str, float]:
        """Scores one condition from its two sequences."""
        shown, replaced = answers
        return {**super().score(cell, [shown]), "retrieval_gain": float((replaced[0] - shown[0]).mean())}

    def metrics(self) -> dict[str, bool]:
        """Returns the metrics of a condition, and whether more is better."""
        return {**super().metrics(), "retrieval_gain": True}


class MqrarTask(WithRetrievalGain):
    """The token-level form, for models trained on it: options `pairs`, `n_back`, `vocabulary`."""

    option_keys = frozenset({"n_back", "pairs", "vocabulary"})

    def prepare(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Reads the options."""
        self.num_samples = whole_number(metadata, "num_samples", 200, least=1)
        self.seed = whole_number(metadata, "seed", 42, least=0)
        self._vocabulary = whole_number(metadata, "vocabulary", VOCABULARY, least=6)
        lengths, _ = context_lengths(metadata, name, (LENGTH_TOKENS,))
        pairs, steps = counts(metadata, "pairs", PAIRS), counts(metadata, "n_back", (1,))
        self.cells = [Cell(*cell) for cell in itertools.product(lengths, pairs, steps)]
        for cell in self.cells:
            self._setting(cell)
        known = _vocabulary_of(metadata.get("pretrained"))
        if known is not None and known < self._vocabulary:
            raise UserError(
                f"{name} uses {self._vocabulary} token ids and the model has {known}: run it on a model trained on it, "
                "or set vocabulary; sb_mqrar_text is for pretrained models."
            )

    def _setting(self, cell: Cell) -> Mqrar:
        return Mqrar(
            length_tokens=cell.context_length,
            pairs=cell.pairs or 1,
            vocabulary=self._vocabulary,
            n_back=cell.n_back,
        )

    def asked(self, index: int, cell: Cell) -> list[Asked]:
        """Makes one sequence, and the same with other values."""
        setting = self._setting(cell)
        shown = setting.sequence(self.seed, index)
        replaced = with_other_values(setting, shown, self.seed, index)
        each = np.ones(len(shown.targets_T), dtype=np.int64)
        return [Asked(TargetSequence(*sequence), each) for sequence in (shown, replaced)]

    def chance(self, cell: Cell) -> float:
        """Returns the share of one value among all."""
        return self._setting(cell).chance


class MqrarTextTask(WithRetrievalGain, TextRecallTask):
    """The text form: numbers assigned to names, shown by `print`, and assigned anew.

    The number shown is the one `n_back` assignments ago, so each answer stands in the text and is predicted from what
    is before it.
    """

    default_lengths = TEXT_LENGTHS
    option_keys = frozenset({"n_back", "pairs"})

    def prepare(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Reads the options."""
        self._pairs = counts(metadata, "pairs", TEXT_PAIRS)
        self._steps = counts(metadata, "n_back", (1,))
        super().prepare(name, metadata)

    def conditions(self, length: int) -> list[Cell]:
        """Returns one condition for each number of pairs and of steps back."""
        return [Cell(length, pairs, steps) for pairs in self._pairs for steps in self._steps]

    def passages(self, index: int, cell: Cell, events: int) -> list[Passage]:
        """Writes every name's first assignments, then `events` times print and assignment; once with other numbers."""
        return [self._passage(index, cell, events, replaced=replaced) for replaced in (False, True)]

    def _passage(self, index: int, cell: Cell, events: int, *, replaced: bool) -> Passage:
        pairs = cell.pairs or 1
        rng = seeded_random(self.config.task, self.seed, index, pairs)
        others = seeded_random(self.config.task, self.seed, index, pairs, "other numbers")
        names = rng.sample(_names(), pairs)
        text: list[str] = []
        spans: list[tuple[int, int]] = []
        history: dict[str, list[str]] = {name: [] for name in names}
        written = 0

        def write(part: str) -> None:
            nonlocal written
            text.append(part)
            written += len(part)

        def assign(name: str) -> None:
            past = history[name]
            value = _number(rng, past[-1:])
            past.append(value)
            write(f"{name} = {_number(others, [value]) if replaced else value}\n")

        for _ in range(cell.n_back):
            for name in rng.sample(names, pairs):
                assign(name)
        for _ in range(events):
            name = rng.choice(names)
            write(f"print({name})  # ")
            spans.append((written, written + VALUE_DIGITS))
            write(f"{history[name][-cell.n_back]}\n")
            assign(name)
        return Passage("".join(text), spans)

    def chance(self, cell: Cell) -> float:
        """Returns the share of one number among all."""
        return 1.0 / (9 * int(10 ** (VALUE_DIGITS - 1)))


def _number(rng: random.Random, taken: Sequence[str]) -> str:
    """Draws a number that is none of some others."""
    while True:
        number = str(rng.randrange(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS))
        if number not in taken:
            return number


def _names() -> list[str]:
    nouns, _, _ = word_lists()
    return [noun for noun in nouns if 4 <= len(noun) <= 9 and set(noun) <= set(string.ascii_lowercase)]


def _vocabulary_of(pretrained: object) -> int | None:
    path = Path(str(pretrained)) / "config.json" if isinstance(pretrained, str) else None
    if path is None or not path.is_file():
        return None
    size = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
    return size if isinstance(size, int) else None
