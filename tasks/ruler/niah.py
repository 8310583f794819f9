"""Needles in a haystack: the eight NIAH tasks."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.tasks.draws import draw, draw_distinct, seeded_order, seeded_random
from sbeval.tasks.ruler.drafts import HaystackDraft, Insert
from sbeval.tasks.ruler.haystacks import Haystack, LineHaystack, NoiseHaystack
from sbeval.tasks.ruler.options import NiahOptions
from sbeval.tasks.ruler.texts import load_essays
from sbeval.tasks.ruler.wording import niah_wording
from sbeval.tasks.tokens import TokenCounter

POOL_LINES = 8192
_KEYS, _VALUES = ("for", " is"), (":", ".\nA")
DEPTHS = tuple(round(100 * i / 39) for i in range(40))


class NiahGenerator:
    """Makes the samples of one needle task.

    Args:
        options: what is asked.
        task: its name, part of every seed.
        counter: the model's tokenizer.
    """

    def __init__(self, options: NiahOptions, *, task: str, counter: TokenCounter) -> None:
        self.haystack = options.type_haystack
        self.key_type, self.value_type = options.type_needle_k, options.type_needle_v
        self.queries = options.num_needle_q
        self.keys = max(options.num_needle_k, self.queries)
        self.values_per_key = options.num_needle_v
        self._one = self.queries * self.values_per_key == 1
        self._inline = self.haystack == "essay"
        self._essays = options.essays
        self._name = (task, options.seed)
        self._depths_percent = options.depths
        self._counter = counter
        self._wording = niah_wording()
        self._drafts: dict[int, HaystackDraft] = {}
        if self._inline and self.keys * self.values_per_key > len(DEPTHS):
            raise UserError(f"{task} has {len(DEPTHS)} depths in essays, so at most that many needles; ask for fewer.")

    def draft(self, index: int, context_length: int) -> HaystackDraft:
        """Makes sample `index`, the same at every length."""
        if index not in self._drafts:
            self._drafts[index] = self._make(index)
        return self._drafts[index]

    def needle(self, key: str, value: str) -> str:
        """Returns the needle sentence; its noun stays in the plural, as RULER has it."""
        return self._wording.needle.format(type_needle_v=self.value_type, key=key, value=value)

    def value_in_needle(self, value: str) -> str:
        """Returns a value as its needle shows it, and as nothing else in a prompt does."""
        return f": {value}."

    def _make(self, index: int) -> HaystackDraft:
        rng = seeded_random(*self._name, index, "needles")
        keys = draw_distinct(self.key_type, self.keys, rng, self.haystack_strings)
        values = draw_distinct(self.value_type, self.keys * self.values_per_key, rng, self.haystack_strings)
        of_key = {key: values[i * self.values_per_key :][: self.values_per_key] for i, key in enumerate(keys)}
        asked = rng.sample(keys, self.queries)
        needles = [(key, value) for key in keys for value in of_key[key]]
        rng.shuffle(needles)
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        template, noun = self._template
        opening, closing = template.split("{context}")
        prefix = self._wording.prefix_one if self._one else self._wording.prefix_many
        return HaystackDraft(
            references=[value for key in asked for value in of_key[key]],
            answer_prefix=prefix.format(type_needle_v=noun, query=query),
            opening=[opening.format(type_needle_v=noun)],
            closing=("\n" if self._inline else "") + closing.removeprefix("\n").format(type_needle_v=noun, query=query),
            haystack=self._make_haystack(index),
            inserts=self._inserts(index, needles, asked),
            least_units=len(needles),
            most_units=POOL_LINES if self.haystack == "needle" else None,
            counter=self._counter,
        )

    @functools.cached_property
    def _template(self) -> tuple[str, str]:
        """Template and noun, in RULER's singular where one value is asked for."""
        template, noun = self._wording.template, str(self.value_type)
        if not self._one:
            return template, noun
        for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
            template = template.replace(plural, singular)
        return template, noun[:-1]

    @property
    def haystack_strings(self) -> frozenset[str]:
        """Keys and values of a needle haystack, which no sample's own needle has."""
        return self._pool[1] if self.haystack == "needle" else frozenset()

    @functools.cached_property
    def _pool(self) -> tuple[list[str], frozenset[str], NDArray[np.int64]]:
        """Lines of a needle haystack, their keys and values, and their token counts."""
        rng = seeded_random(*self._name, "pool")
        keys = draw_distinct(self.key_type, POOL_LINES, rng, frozenset())
        values = [draw(self.value_type, rng) for _ in keys]
        lines = [self.needle(key, value) + "\n" for key, value in zip(keys, values, strict=True)]
        key_tokens = self._counter.count_pool([" " + key for key in keys], _KEYS)
        value_tokens = self._counter.count_pool([" " + value for value in values], _VALUES)
        rest = self._counter.count_pieces(lines[:1])[0] - key_tokens[0] - value_tokens[0]
        return lines, frozenset((*keys, *values)), rest + key_tokens + value_tokens

    @functools.cached_property
    def _shared_haystack(self) -> Haystack:
        """The haystack of all samples: essays or noise."""
        if self._inline:
            return load_essays(self._essays).haystack(self._counter)
        line = self._wording.noise + "\n"
        return NoiseHaystack(line=line, line_tokens=int(self._counter.count_pieces([line])[0]))

    def _make_haystack(self, index: int) -> Haystack:
        if self.haystack != "needle":
            return self._shared_haystack
        lines, _, tokens = self._pool
        order = seeded_order(len(lines), *self._name, index, "haystack")
        return LineHaystack(pool=lines, order=order, cumulative_tokens=np.concatenate(([0], np.cumsum(tokens[order]))))

    def _inserts(self, index: int, needles: Sequence[tuple[str, str]], asked: Sequence[str]) -> list[Insert]:
        texts = [self.needle(key, value) + ("" if self._inline else "\n") for key, value in needles]
        fractions = self._fractions(index, needles, asked)
        inserts = [
            Insert(text=text, fraction=fraction, asked=key in asked)
            for text, fraction, (key, _) in zip(texts, fractions, needles, strict=True)
        ]
        return sorted(inserts, key=lambda insert: insert.fraction)

    def _fractions(self, index: int, needles: Sequence[tuple[str, Any]], asked: Sequence[str]) -> list[float]:
        """Returns the relative depth of each needle, in the order of `needles`."""
        rng = seeded_random(*self._name, index, "depths")
        if self._inline:
            fractions = [depth / 100 for depth in rng.sample(DEPTHS, len(needles))]
        else:
            fractions = [rng.random() for _ in needles]
        if self._depths_percent is not None:
            depth = self._depths_percent[index % len(self._depths_percent)] / 100
            fractions[next(i for i, (key, _) in enumerate(needles) if key == asked[0])] = depth
        return fractions
