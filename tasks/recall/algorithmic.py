"""Tasks over token ids for models that were trained on them: the end of a sequence follows by an algorithm.

One forward pass scores the whole answer. Its every token is the most probable one exactly if greedy generation writes
the answer, so `exact_match` is the exact match of generated answers.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from sbeval.checkpoints.facts import local_config
from sbeval.errors import UserError
from sbeval.scoring.requests import TargetSequence
from sbeval.tasks.recall.algorithms import VOCABULARY, Algorithm, guessed, solved
from sbeval.tasks.recall.options import AlgorithmOptions
from sbeval.tasks.recall.task import Condition, ProbeSequence, RecallTask, Scored


class AlgorithmTask(RecallTask):
    """One algorithm. `exact_match` is the share of whole answers, `token_match` that of their tokens."""

    algorithm: ClassVar[Algorithm]
    options_class = AlgorithmOptions
    options: AlgorithmOptions

    def prepare(self, name: str) -> None:
        """Sets the conditions, and refuses a model whose vocabulary is too small.

        Raises:
            UserError: the checkpoint's vocabulary is smaller than that of the algorithms.
        """
        vocab_size = local_config(self.config.metadata.get("pretrained")).get("vocab_size")
        if isinstance(vocab_size, int) and vocab_size < VOCABULARY:
            raise UserError(
                f"{name} uses {VOCABULARY} token ids and the model has {vocab_size}: use a model that was trained on "
                "this task."
            )
        super().prepare(name)

    def make_sequences(self, index: int, condition: Condition) -> list[ProbeSequence]:
        """Makes the sequence of sample `index`; each of its answers is one token."""
        made = solved(self.algorithm, condition.context_length + 1, self.options.seed, index)
        sequence = TargetSequence(made.tokens_T[:-1], made.answer_N - 1, made.tokens_T[made.answer_N])
        return [ProbeSequence(sequence, np.ones(len(made.answer_N), dtype=np.int64))]

    def score(self, condition: Condition, answers: Sequence[Scored]) -> dict[str, float]:
        """Returns the metrics of one condition."""
        ((nll, exact),) = answers
        last = exact[-1:] if self.algorithm == "flipflop" else exact
        return {
            "exact_match": float(last.min()),
            "token_match": float(exact.mean()),
            "answer_nll": float(nll.mean()),
            "chance": self.chance(condition),
        }

    def metrics(self) -> dict[str, bool]:
        """Returns the metrics of a condition: whether higher is better, by name."""
        return {**super().metrics(), "token_match": True}

    def chance(self, condition: Condition) -> float:
        """Returns the exact match of random symbols."""
        return guessed(self.algorithm, condition.context_length + 1)


class CopySourceTask(AlgorithmTask):
    """A random source of 32 symbols is repeated; models must be trained on it."""

    algorithm = "copy"


class ReverseTask(AlgorithmTask):
    """A random source of 32 symbols is repeated backwards; models must be trained on it."""

    algorithm = "reverse"


class SortTask(AlgorithmTask):
    """A random source of 32 symbols is repeated in ascending order; models must be trained on it."""

    algorithm = "sort"


class TwoBackTask(AlgorithmTask):
    """After each of 16 random symbols follows the symbol of two steps before; models must be trained on it."""

    algorithm = "two_back"


class FlipFlopTokensTask(AlgorithmTask):
    """Flip-flops over token ids, whose last instruction is a read; models must be trained on it."""

    algorithm = "flipflop"


class AssociationTokensTask(AlgorithmTask):
    """Four of many keys of two symbols are asked for, each with a value of two; models must be trained on it."""

    algorithm = "association"
