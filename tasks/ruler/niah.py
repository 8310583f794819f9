"""Needles in a haystack: the eight NIAH tasks."""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.tasks.draws import draw, draw_distinct, seeded_order, seeded_random
from sbeval.tasks.ruler.drafts import Generator, HaystackDraft, Insert, Steps
from sbeval.tasks.ruler.haystacks import Haystack, LineHaystack, NoiseHaystack
from sbeval.tasks.ruler.options import NiahOptions, VtOptions
from sbeval.tasks.ruler.texts import load_essays
from sbeval.tasks.ruler.wording import niah_wording

POOL_LINES = 8192
SHORT_TOKENS = 4096
"""Below this length NVIDIA's scripts take smaller steps where the haystack is lines."""
_KEYS, _VALUES = ("for", " is"), (":", ".\nA")
DEPTHS = tuple(round(100 * i / 39) for i in range(40))


class HaystackGenerator(Generator):
    """Makes samples that are the same at every length, in essays or noise.

    Attributes:
        step_lines: lines of a step of NVIDIA's scripts from `SHORT_TOKENS` on.
    """

    options: NiahOptions | VtOptions
    step_lines: int

    def __init__(self, options: NiahOptions | VtOptions, **setting: Any) -> None:
        super().__init__(options, **setting)
        self._inline = options.type_haystack == "essay"
        self._drafts: dict[int, HaystackDraft] = {}

    def draft(self, index: int, context_length: int) -> HaystackDraft:
        """Makes sample `index`, the same at every length."""
        if index not in self._drafts:
            self._drafts[index] = self._make(index)
        return self._drafts[index]

    @abstractmethod
    def _make(self, index: int) -> HaystackDraft: ...

    def steps(self, length: int) -> Steps | None:
        """Returns 500 words of essays, or some lines, 5 at short lengths."""
        return Steps(500 if self._inline else self.step_lines if length >= SHORT_TOKENS else 5)

    @functools.cached_property
    def _shared_haystack(self) -> Haystack:
        """The haystack of all samples: essays or noise."""
        if self._inline:
            return load_essays(self.options.essays).haystack(self._counter)
        line = niah_wording().noise + "\n"
        return NoiseHaystack(line=line, line_tokens=int(self._counter.count_pieces([line])[0]))


class NiahGenerator(HaystackGenerator):
    """Makes the samples of one needle task."""

    options: NiahOptions
    step_lines = 25

    def __init__(self, options: NiahOptions, *, task: str, **setting: Any) -> None:
        super().__init__(options, task=task, **setting)
        self.keys = max(options.num_needle_k, options.num_needle_q)
        self.asks_one = options.num_needle_q * options.num_needle_v == 1
        self._wording = niah_wording()
        if self._inline and self.keys * options.num_needle_v > len(DEPTHS):
            raise UserError(f"{task} has {len(DEPTHS)} depths in essays, so at most that many needles; ask for fewer.")

    def needle(self, key: str, value: str) -> str:
        """Returns the needle sentence; its noun stays in the plural, as RULER has it."""
        return self._wording.needle.format(type_needle_v=self.options.type_needle_v, key=key, value=value)

    def value_in_needle(self, value: str) -> str:
        """Returns a value as its needle shows it, and as nothing else in a prompt does."""
        return f": {value}."

    def _make(self, index: int) -> HaystackDraft:
        rng = seeded_random(*self._name, index, "needles")
        options, each = self.options, self.options.num_needle_v
        keys = draw_distinct(options.type_needle_k, self.keys, rng, self.haystack_strings)
        values = draw_distinct(options.type_needle_v, self.keys * each, rng, self.haystack_strings)
        of_key = {key: values[i * each :][:each] for i, key in enumerate(keys)}
        asked = rng.sample(keys, options.num_needle_q)
        needles = [(key, value) for key in keys for value in of_key[key]]
        rng.shuffle(needles)
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        template, noun = self._template
        opening, closing = template.split("{context}")
        prefix = self._wording.prefix_one if self.asks_one else self._wording.prefix_many
        return HaystackDraft(
            references=[value for key in asked for value in of_key[key]],
            answer_prefix=prefix.format(type_needle_v=noun, query=query),
            opening=[opening.format(type_needle_v=noun)],
            closing=("\n" if self._inline else "") + closing.removeprefix("\n").format(type_needle_v=noun, query=query),
            haystack=self._make_haystack(index),
            inserts=self._inserts(index, needles, asked),
            least_units=len(needles),
            most_units=POOL_LINES if self.options.type_haystack == "needle" else None,
            counter=self._counter,
        )

    @functools.cached_property
    def _template(self) -> tuple[str, str]:
        """Template and noun, in RULER's singular where one value is asked for."""
        template, noun = self._wording.template, str(self.options.type_needle_v)
        if not self.asks_one:
            return template, noun
        for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
            template = template.replace(plural, singular)
        return template, noun[:-1]

    @property
    def haystack_strings(self) -> frozenset[str]:
        """Keys and values of a needle haystack, which no sample's own needle has."""
        return self._pool[1] if self.options.type_haystack == "needle" else frozenset()

    @functools.cached_property
    def _pool(self) -> tuple[list[str], frozenset[str], NDArray[np.int64]]:
        """Lines of a needle haystack, their keys and values, and their token counts."""
        rng = seeded_random(*self._name, "pool")
        keys = draw_distinct(self.options.type_needle_k, POOL_LINES, rng, frozenset())
        values = [draw(self.options.type_needle_v, rng) for _ in keys]
        lines = [self.needle(key, value) + "\n" for key, value in zip(keys, values, strict=True)]
        key_tokens = self._counter.count_pool([" " + key for key in keys], _KEYS)
        value_tokens = self._counter.count_pool([" " + value for value in values], _VALUES)
        rest = self._counter.count_pieces(lines[:1])[0] - key_tokens[0] - value_tokens[0]
        return lines, frozenset((*keys, *values)), rest + key_tokens + value_tokens

    def _make_haystack(self, index: int) -> Haystack:
        if self.options.type_haystack != "needle":
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
        if (depths := self.options.depths) is not None:
            depth = depths[index % len(depths)] / 100
            fractions[next(i for i, (key, _) in enumerate(needles) if key == asked[0])] = depth
        return fractions
