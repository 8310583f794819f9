"""Multi-query repeated associative recall over a vocabulary of its own and as text; and flip-flops, its simplest form.

Flip-flop language modelling writes, ignores and reads a single bit; a read shows the bit written last. It is a probe of
recency, after Liu et al., *Exposing Attention Glitches with Flip-Flop Language Modeling* (arXiv 2306.00946).
"""

import random
from collections.abc import Sequence

import numpy as np

from sbeval.checkpoints.facts import local_config
from sbeval.errors import UserError
from sbeval.tasks.draws import distinct, seeded_random, short_nouns
from sbeval.tasks.recall.options import FlipFlopOptions, MqrarOptions, MqrarTextOptions
from sbeval.tasks.recall.sequences import Mqrar, with_other_values
from sbeval.tasks.recall.task import Asked, Condition, Passage, TextRecallTask, WithRetrievalGain

VALUE_DIGITS = 4


class OverPairs(WithRetrievalGain):
    """Has a condition for each number of pairs and of steps back."""

    options: MqrarTextOptions

    def conditions(self, length: int) -> list[Condition]:
        """Returns one condition for each number of pairs and of steps back."""
        return [Condition(length, pairs, steps) for pairs in self.options.pairs for steps in self.options.n_back]


class MqrarTask(OverPairs):
    """The token-level form, for models trained on it."""

    options_class = MqrarOptions
    options: MqrarOptions

    def prepare(self, name: str) -> None:
        """Refuses a model without the tokens."""
        super().prepare(name)
        known = local_config(self.config.metadata.get("pretrained")).get("vocab_size")
        if isinstance(known, int) and known < self.options.vocabulary:
            remedy = "run it on a model trained on it, or set vocabulary; sb_mqrar_text is for pretrained models"
            raise UserError(f"{name} uses {self.options.vocabulary} token ids and the model has {known}: {remedy}.")

    def _setting(self, condition: Condition) -> Mqrar:
        length = condition.context_length
        pairs = condition.pairs or 1
        vocabulary = self.options.vocabulary
        return Mqrar(length_tokens=length, pairs=pairs, vocabulary=vocabulary, n_back=condition.n_back)

    def asked(self, index: int, condition: Condition) -> list[Asked]:
        """Makes one sequence, and the same with other values."""
        setting = self._setting(condition)
        shown = setting.sequence(self.options.seed, index)
        replaced = with_other_values(setting, shown, self.options.seed, index)
        each = np.ones(len(shown.targets_T), dtype=np.int64)
        return [Asked(sequence, each) for sequence in (shown, replaced)]

    def chance(self, condition: Condition) -> float:
        """Returns the share of one value among all."""
        return self._setting(condition).chance


class MqrarTextTask(OverPairs, TextRecallTask):
    """The text form: numbers assigned to names, shown by `print`, and assigned anew.

    The number shown is the one `n_back` assignments ago, so each answer stands in the text and is predicted from what
    is before it.
    """

    options_class = MqrarTextOptions
    options: MqrarTextOptions

    def passages(self, index: int, condition: Condition, events: int) -> list[Passage]:
        """Writes every name's first assignments, then `events` times print and assignment; once with other numbers."""
        return [self._passage(index, condition, events, replaced=replaced) for replaced in (False, True)]

    def _passage(self, index: int, condition: Condition, events: int, *, replaced: bool) -> Passage:
        pairs = condition.pairs or 1
        rng = seeded_random(self.config.task, self.options.seed, index, pairs)
        others = seeded_random(self.config.task, self.options.seed, index, pairs, "other numbers")
        names = rng.sample(short_nouns(), pairs)
        text: list[str] = []
        spans: list[tuple[int, int]] = []
        history: dict[str, list[str]] = {name: [] for name in names}
        written = 0

        def write(piece: str) -> None:
            nonlocal written
            text.append(piece)
            written += len(piece)

        def assign(name: str) -> None:
            past = history[name]
            value = _number(rng, past[-1:])
            past.append(value)
            write(f"{name} = {_number(others, [value]) if replaced else value}\n")

        for _ in range(condition.n_back):
            for name in rng.sample(names, pairs):
                assign(name)
        for _ in range(events):
            name = rng.choice(names)
            write(f"print({name})  # ")
            spans.append((written, written + VALUE_DIGITS))
            write(f"{history[name][-condition.n_back]}\n")
            assign(name)
        return Passage("".join(text), spans)

    def chance(self, condition: Condition) -> float:
        """Returns the share of one number among all."""
        return 1.0 / (9 * int(10 ** (VALUE_DIGITS - 1)))


def _number(rng: random.Random, taken: Sequence[str]) -> str:
    """Draws a number that is none of some others."""
    return distinct(1, lambda: str(rng.randrange(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS)), taken)[0]


class FlipFlopTask(TextRecallTask):
    """Flip-flop language modelling; scores the bit after every read."""

    options_class = FlipFlopOptions
    options: FlipFlopOptions

    def passages(self, index: int, condition: Condition, events: int) -> list[Passage]:
        """Writes instructions, the first of them a write."""
        rng = seeded_random(self.config.task, self.options.seed, index)
        text = [f"w {(bit := rng.randrange(2))}"]
        spans = []
        written = len(text[0])
        for _ in range(events):
            ignored = rng.random() < self.options.ignore_share
            reads = rng.random() < 0.5
            drawn = rng.randrange(2)
            if ignored:
                name, shown = "i", drawn
            elif reads:
                name, shown = "r", bit
            else:
                name, shown = "w", drawn
                bit = drawn
            text.append(f" {name} {shown}")
            written += len(text[-1])
            if name == "r":
                spans.append((written - 1, written))
        return [Passage("".join(text), spans)]

    def chance(self, condition: Condition) -> float:
        """Returns one half."""
        return 0.5
