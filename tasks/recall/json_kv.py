"""JSON key-value retrieval: the prompt is a long JSON object of random pairs and asks for the value of one key.

After Liu et al., *Lost in the Middle* (arXiv 2307.03172), in the form of HELMET (Yen et al., arXiv 2410.02694): the
object comes first, then two worked examples; keys and values are UUIDs. The wording of the instruction is this
project's.
"""

import dataclasses
import functools
import json
import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.tasks.draws import NeedleType, draw_distinct, seeded_order, seeded_random
from sbeval.tasks.ruler.absent import NONE
from sbeval.tasks.ruler.drafts import HaystackDraft
from sbeval.tasks.ruler.families import ForcedNiahTask, NiahTask
from sbeval.tasks.ruler.haystacks import Haystack, LineHaystack, running_totals
from sbeval.tasks.ruler.niah import NiahGenerator
from sbeval.tasks.ruler.options import NiahOptions

POOL_PAIRS, BLOCK_PAIRS = 65536, 8192
LEAST_PAIR_TOKENS = 32
"""Lower bound for the tokens of a pair of UUIDs, with every tokenizer that was tried; the pool fills 2M tokens."""
INSTRUCTION = "Look up keys in the JSON object above."


class JsonKvGenerator(NiahGenerator):
    """Makes the samples of JSON key-value retrieval: the needles are pairs of key and value in a haystack of pairs.

    The question asks for the value of one of the `num_needle_k` keys; the other keys become worked examples.

    Raises:
        UserError: the options name another haystack, or several answers.
    """

    def __init__(self, options: NiahOptions, *, task: str, **setting: Any) -> None:
        super().__init__(options, task=task, **setting)
        self._block_tokens: list[NDArray[np.int64]] = []
        if options.type_haystack != "needle" or not self.has_single_answer:
            remedy = "leave type_haystack, num_needle_q and num_needle_v out"
            raise UserError(f"{task} asks for one value in one JSON object: {remedy}.")

    def steps(self, length: int) -> None:
        """Returns None: NVIDIA's RULER scripts, whose rule for filling prompts has steps, do not have this task."""

    def needle(self, key: str, value: str) -> str:
        """Returns one pair of key and value as a line of the JSON object."""
        return f'"{key}": "{value}",'

    def value_in_needle(self, value: str) -> str:
        """Returns a value with the characters around it in its pair, a text that is nowhere else in the prompt."""
        return f': "{value}"'

    def draft(self, index: int, context_length: int) -> HaystackDraft:
        """Makes sample `index`, which is the same at every length; tokenises only as many pairs as the length needs."""
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
        """The lines of all pairs that a haystack may hold, and the set of their keys and values."""
        rng = seeded_random(*self._name, "pool")
        keys, values = (draw_distinct(kind, POOL_PAIRS, rng, frozenset()) for kind in self._kinds)
        lines = [self.needle(key, value) + "\n" for key, value in zip(keys, values, strict=True)]
        return lines, frozenset((*keys, *values))

    @property
    def haystack_strings(self) -> frozenset[str]:
        """Keys and values of all pairs in the haystack."""
        return self._lines[1]

    def _make_haystack(self, index: int) -> Haystack:
        """Shuffles the pairs within each block, so that a shorter haystack is the beginning of a longer one."""
        name = (*self._name, index, "haystack")
        blocks = range(len(self._block_tokens))
        order = np.concatenate([i * BLOCK_PAIRS + seeded_order(BLOCK_PAIRS, *name, i) for i in blocks])
        totals = running_totals(np.concatenate(self._block_tokens)[order])
        return LineHaystack(pool=self._lines[0], order=order, cumulative_tokens=totals)

    def asks_for_absent(self, index: int, draft: HaystackDraft, rng: random.Random) -> HaystackDraft:
        """Returns the sample with a question about a key that is not in the object."""
        before, _, _ = draft.closing.rpartition("Key: ")
        (key,) = self.absent_keys(draft, rng)
        while key in before:
            (key,) = self.absent_keys(draft, rng)
        return dataclasses.replace(draft, references=[NONE], closing=f"{before}Key: {key}")

    def says_absence(self, closing: str) -> str:
        """Returns the text after the pairs with a sentence on the value of a key that is not there."""
        return closing.replace(INSTRUCTION, f'{INSTRUCTION} The value of a key that is not there is "{NONE}".')

    def value_of_line(self, line: str) -> str | None:
        """Returns the value in a line of the object."""
        (value,) = json.loads(f"{{{line.rstrip().removesuffix(',')}}}").values()
        return str(value)

    def _make(self, index: int) -> HaystackDraft:
        draft = super()._make(index)
        queried_pairs: list[tuple[str, str]] = []
        example_pairs: list[tuple[str, str]] = []
        for insert in draft.inserts:
            pairs = queried_pairs if insert.is_queried else example_pairs
            pairs += json.loads(f"{{{insert.text[:-2]}}}").items()
        ((queried_key, _),) = queried_pairs
        examples = "".join(f"Key: {key} Value: {value}\n" for key, value in example_pairs)
        rng = seeded_random(*self._name, index, "last pair")
        taken = self.haystack_strings.union(*queried_pairs, *example_pairs)
        last_key, last_value = (draw_distinct(kind, 1, rng, taken)[0] for kind in self._kinds)
        return dataclasses.replace(
            draft,
            opening=["{\n"],
            closing=f'"{last_key}": "{last_value}"}}\n\n{INSTRUCTION}\n{examples}Key: {queried_key}',
            answer_prefix="Value:",
            most_units=len(self._block_tokens) * BLOCK_PAIRS,
        )


class JsonKvTask(NiahTask):
    """JSON key-value retrieval by generation."""

    generator_class = JsonKvGenerator


class ForcedJsonKvTask(ForcedNiahTask, JsonKvTask):
    """The prompts of `sb_json_kv`; one forward pass scores the value instead of generating it."""
