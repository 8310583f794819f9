"""Multi-query repeated associative recall (MQRAR) over token ids and as text, and flip-flop language modelling.

A flip-flop sequence consists of instructions that write, ignore or read a single bit; a read instruction shows the bit
that was written last. It tests whether a model finds the latest of many earlier values, after Liu et al., *Exposing
Attention Glitches with Flip-Flop Language Modeling* (arXiv 2306.00946).
"""

import random
from collections.abc import Sequence

import numpy as np

from sbeval.checkpoints.facts import local_config
from sbeval.errors import UserError
from sbeval.tasks.draws import distinct, seeded_random, short_nouns
from sbeval.tasks.recall.options import FlipFlopOptions, MqrarOptions, MqrarTextOptions
from sbeval.tasks.recall.sequences import Mqrar, with_other_values
from sbeval.tasks.recall.task import Condition, Passage, ProbeSequence, TextRecallTask, WithRetrievalGain

VALUE_DIGITS = 4


class OverPairs(WithRetrievalGain):
    """A probe with one condition for each number of pairs and each `n_back`.

    A pair is a key with its values. With `n_back` 1 the answer is the latest value of a key, with 2 the value before
    it, and so on. Each condition has its own metrics.
    """

    options: MqrarTextOptions

    def conditions(self, length: int) -> list[Condition]:
        """Returns one condition for each combination of a number of keys and a value of `n_back`."""
        return [Condition(length, pairs, n_back) for pairs in self.options.pairs for n_back in self.options.n_back]


class MqrarTask(OverPairs):
    """MQRAR over token ids, for models that were trained on it."""

    options_class = MqrarOptions
    options: MqrarOptions

    def prepare(self, name: str) -> None:
        """Sets the conditions, and refuses a model whose vocabulary is too small.

        Raises:
            UserError: the checkpoint's vocabulary is smaller than the option `vocabulary`.
        """
        super().prepare(name)
        vocab_size = local_config(self.config.metadata.get("pretrained")).get("vocab_size")
        if isinstance(vocab_size, int) and vocab_size < self.options.vocabulary:
            remedy = (
                "use a model that was trained on this task, or set vocabulary; for pretrained models use sb_mqrar_text"
            )
            raise UserError(
                f"{name} uses {self.options.vocabulary} token ids and the model has {vocab_size}: {remedy}."
            )

    def _setting(self, condition: Condition) -> Mqrar:
        length = condition.context_length
        pairs = condition.pairs or 1
        vocabulary = self.options.vocabulary
        return Mqrar(length_tokens=length, pairs=pairs, vocabulary=vocabulary, n_back=condition.n_back)

    def make_sequences(self, index: int, condition: Condition) -> list[ProbeSequence]:
        """Makes two sequences with the same targets: the original, and one in which other values replace all values."""
        setting = self._setting(condition)
        original = setting.sequence(self.options.seed, index)
        replaced = with_other_values(setting, original, self.options.seed, index)
        answer_tokens = np.ones(len(original.targets_T), dtype=np.int64)
        return [ProbeSequence(sequence, answer_tokens) for sequence in (original, replaced)]

    def chance(self, condition: Condition) -> float:
        """Returns the exact match of a random guess among all values."""
        return self._setting(condition).chance


class MqrarTextTask(OverPairs, TextRecallTask):
    """MQRAR as text: a program assigns numbers to names, prints them, and assigns new numbers.

    A print statement is followed by the number that the name was assigned `n_back` assignments ago. These numbers are
    the answers. As they are part of the text, one forward pass predicts each of them from the text before it.
    """

    options_class = MqrarTextOptions
    options: MqrarTextOptions

    def passages(self, index: int, condition: Condition, events: int) -> list[Passage]:
        """Writes two texts: first assignments of all names, then `events` pairs of a print and an assignment.

        The second text assigns other numbers, but its print statements show the same numbers as in the first text.
        """
        return [self._passage(index, condition, events, replaced=replaced) for replaced in (False, True)]

    def _passage(self, index: int, condition: Condition, events: int, *, replaced: bool) -> Passage:
        pairs = condition.pairs or 1
        rng = seeded_random(self.config.task, self.options.seed, index, pairs)
        replacements = seeded_random(self.config.task, self.options.seed, index, pairs, "other numbers")
        names = rng.sample(short_nouns(), pairs)
        text: list[str] = []
        spans: list[tuple[int, int]] = []
        history: dict[str, list[str]] = {name: [] for name in names}
        written = 0

        def write(new_text: str) -> None:
            nonlocal written
            text.append(new_text)
            written += len(new_text)

        def assign(name: str) -> None:
            past = history[name]
            value = _number(rng, past[-1:])
            past.append(value)
            written_value = _number(replacements, [value]) if replaced else value
            write(f"{name} = {written_value}\n")

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
        """Returns the exact match of a random guess among all numbers of `VALUE_DIGITS` digits."""
        return 1.0 / (9 * int(10 ** (VALUE_DIGITS - 1)))


def _number(rng: random.Random, taken: Sequence[str]) -> str:
    """Draws a number of `VALUE_DIGITS` digits that is not among `taken`."""
    return distinct(1, lambda: str(rng.randrange(10 ** (VALUE_DIGITS - 1), 10**VALUE_DIGITS)), taken)[0]


class FlipFlopTask(TextRecallTask):
    """Flip-flop language modelling; the bit after every read instruction is scored."""

    options_class = FlipFlopOptions
    options: FlipFlopOptions

    def passages(self, index: int, condition: Condition, events: int) -> list[Passage]:
        """Writes one text of `events` instructions, of which the first one writes a bit."""
        rng = seeded_random(self.config.task, self.options.seed, index)
        bit = rng.randrange(2)
        text = [f"w {bit}"]
        spans = []
        written = len(text[0])
        for _ in range(events):
            ignored = rng.random() < self.options.ignore_share
            reads = rng.random() < 0.5
            drawn = rng.randrange(2)
            if ignored:
                name, written_bit = "i", drawn
            elif reads:
                name, written_bit = "r", bit
            else:
                name, written_bit = "w", drawn
                bit = drawn
            text.append(f" {name} {written_bit}")
            written += len(text[-1])
            if name == "r":
                spans.append((written - 1, written))
        return [Passage("".join(text), spans)]

    def chance(self, condition: Condition) -> float:
        """Returns the exact match of a random guess of one bit."""
        return 0.5
