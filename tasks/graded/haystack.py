"""Graded samples with statements in a haystack of lines, which graded needles and graded variables share."""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sbeval.tasks.graded.forms import Question, ending
from sbeval.tasks.graded.options import GradedOptions
from sbeval.tasks.graded.texts import blocks_for, line_order
from sbeval.tasks.ruler.drafts import Generator, HaystackDraft, Insert
from sbeval.tasks.ruler.haystacks import LineHaystack, running_totals


class GradedHaystackGenerator(Generator):
    """Makes samples whose haystack is a pool of lines; only as many lines are tokenised as a length needs."""

    options: GradedOptions
    opening: ClassVar[str]

    def __init__(self, options: GradedOptions, *, task: str, **setting: Any) -> None:
        super().__init__(options, task=task, **setting)
        self._pool: list[str] = []
        self._pool_tokens: list[NDArray[np.int64]] = []

    @abstractmethod
    def question(self, index: int) -> Question:
        """Returns the question of sample `index`."""

    @abstractmethod
    def lines(self, block: int) -> list[str]:
        """Returns one block of the haystack's lines."""

    @abstractmethod
    def inserts(self, index: int) -> Sequence[Insert]:
        """Returns the statements of sample `index`, in any order."""

    def draft(self, index: int, context_length: int) -> HaystackDraft:
        """Makes sample `index`, the same at every length."""
        for block in range(len(self._pool_tokens), blocks_for(context_length)):
            lines = self.lines(block)
            self._pool += lines
            self._pool_tokens.append(self.counter.count_pool(lines))
            self._draft.cache_clear()
        return self._draft(index)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - the cache and the generator live as long as the task
    def _draft(self, index: int) -> HaystackDraft:
        end = ending(self.question(index), self.options.form, *self._name, index)
        order = line_order(len(self._pool_tokens), *self._name, index)
        return HaystackDraft(
            references=end.references,
            answer_prefix=end.answer_prefix,
            opening=[self.opening],
            closing=end.closing,
            haystack=LineHaystack(
                pool=self._pool,
                order=order,
                cumulative_tokens=running_totals(np.concatenate(self._pool_tokens)[order]),
            ),
            inserts=sorted(self.inserts(index), key=lambda insert: insert.fraction),
            least_units=1,
            most_units=len(order),
            counter=self.counter,
        )
