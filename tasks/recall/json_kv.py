"""JSON key-value retrieval: an object of random pairs that fills the length; which value has one of its keys?

After Liu et al., *Lost in the Middle* (arXiv 2307.03172), as HELMET has it (Yen et al., arXiv 2410.02694): the object
first, two worked examples, keys and values that are UUIDs. The instruction's words are this project's.
"""

import dataclasses
import functools
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.tasks.draws import NeedleType, draw_distinct, seeded_order, seeded_random
from sbeval.tasks.ruler.drafts import HaystackDraft
from sbeval.tasks.ruler.families import ForcedNiahTask, NiahTask
from sbeval.tasks.ruler.haystacks import Haystack, LineHaystack, running_totals
from sbeval.tasks.ruler.niah import NiahGenerator
from sbeval.tasks.ruler.options import NiahOptions

POOL_PAIRS, BLOCK_PAIRS = 65536, 8192
LEAST_PAIR_TOKENS = 32
"""Pairs of UUIDs take more with every tokenizer tried, so the pool fills 2M tokens."""
INSTRUCTION = "Look up keys in the JSON object above."


class JsonKvGenerator(NiahGenerator):
    """Makes the samples of JSON key-value retrieval: needles that are pairs, in a haystack of other pairs.

    Of `num_needle_k` keys the first is asked for, the others are worked examples.

    Raises:
        UserError: another haystack than pairs, or several answers.
    """

    def __init__(self, options: NiahOptions, *, task: str, **setting: Any) -> None:
        super().__init__(options, task=task, **setting)
        self._block_tokens: list[NDArray[np.int64]] = []
        if options.type_haystack != "needle" or not self.asks_one:
            remedy = "leave type_haystack, num_needle_q and num_needle_v out"
            raise UserError(f"{task} asks for one value in an object of pairs: {remedy}.")

    def steps(self, length: int) -> None:
        """Returns None: NVIDIA's scripts have no such task."""

    def needle(self, key: str, value: str) -> str:
        """Returns one pair of the object."""
        return f'"{key}": "{value}",'

    def value_in_needle(self, value: str) -> str:
        """Returns a value as a pair shows it, and as nothing else does."""
        return f': "{value}"'

    def draft(self, index: int, context_length: int) -> HaystackDraft:
        """Makes sample `index`, the same at every length; pairs are counted as far as a length needs them."""
        blocks = 1 + context_length // (LEAST_PAIR_TOKENS * BLOCK_PAIRS)
        for first in range(len(self._block_tokens) * BLOCK_PAIRS, min(POOL_PAIRS, blocks * BLOCK_PAIRS), BLOCK_PAIRS):
            lines = self._lines[0][first : first + BLOCK_PAIRS]
            self._block_tokens.append(self.counter.count_pool(lines))
            self._drafts.clear()
        return super().draft(index, context_length)

    @property
    def _kinds(self) -> tuple[NeedleType, NeedleType]:
        return self.options.type_needle_k, self.options.type_needle_v

    @functools.cached_property
    def _lines(self) -> tuple[list[str], frozenset[str]]:
        """The lines of all pairs, and their keys and values."""
        rng = seeded_random(*self._name, "pool")
        keys, values = (draw_distinct(kind, POOL_PAIRS, rng, frozenset()) for kind in self._kinds)
        lines = [self.needle(key, value) + "\n" for key, value in zip(keys, values, strict=True)]
        return lines, frozenset((*keys, *values))

    @property
    def haystack_strings(self) -> frozenset[str]:
        """Keys and values of all pairs of the haystack."""
        return self._lines[1]

    def _make_haystack(self, index: int) -> Haystack:
        """Orders the pairs block by block, so that a longer haystack begins with a shorter one."""
        name = (*self._name, index, "haystack")
        blocks = range(len(self._block_tokens))
        order = np.concatenate([i * BLOCK_PAIRS + seeded_order(BLOCK_PAIRS, *name, i) for i in blocks])
        totals = running_totals(np.concatenate(self._block_tokens)[order])
        return LineHaystack(pool=self._lines[0], order=order, cumulative_tokens=totals)

    def _make(self, index: int) -> HaystackDraft:
        draft = super()._make(index)
        pairs: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
        for insert in draft.inserts:
            pairs[insert.asked] += json.loads(f"{{{insert.text[:-2]}}}").items()
        ((asked, _),) = pairs[True]
        shown = "".join(f"Key: {key} Value: {value}\n" for key, value in pairs[False])
        rng = seeded_random(*self._name, index, "last pair")
        taken = self.haystack_strings.union(*(pair for some in pairs.values() for pair in some))
        last_key, last_value = (draw_distinct(kind, 1, rng, taken)[0] for kind in self._kinds)
        return dataclasses.replace(
            draft,
            opening=["{\n"],
            closing=f'"{last_key}": "{last_value}"}}\n\n{INSTRUCTION}\n{shown}Key: {asked}',
            answer_prefix="Value:",
            most_units=len(self._block_tokens) * BLOCK_PAIRS,
        )


class JsonKvTask(NiahTask):
    """JSON key-value retrieval by generation."""

    generator_class = JsonKvGenerator


class ForcedJsonKvTask(ForcedNiahTask, JsonKvTask):
    """The same prompts, the value scored under the model in one forward pass."""
