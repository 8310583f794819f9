"""Generators of tasks with a haystack: the eight needle-in-a-haystack (NIAH) tasks, and variable tracking."""

import bisect
import functools
import itertools
import random
import string
from abc import abstractmethod
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.tasks.draws import distinct, draw, draw_distinct, log_count, seeded_order, seeded_random
from sbeval.tasks.ruler.drafts import Generator, HaystackDraft, Insert, Steps, with_inserts
from sbeval.tasks.ruler.haystacks import Haystack, LineHaystack, NoiseHaystack, running_totals
from sbeval.tasks.ruler.options import NiahOptions, RulerOptions, VtOptions
from sbeval.tasks.ruler.texts import load_essays
from sbeval.tasks.ruler.wording import TaskWording, niah_wording, task_wording

POOL_LINES = 8192
SHORT_TOKENS = 4096
"""Below this context length in tokens NVIDIA's scripts remove only 5 lines at a time until a prompt fits."""
_KEYS, _VALUES = ("for", " is"), (":", ".\nA")
DEPTHS = tuple(round(100 * i / 39) for i in range(40))
DEMONSTRATION_TOKENS = 500
_LEAST_DEMONSTRATION_LINES, _LEAST_DEMONSTRATION_WORDS = 5, 50
_MOST_DEMONSTRATION_HOPS = 10


class HaystackGenerator(Generator):
    """Makes samples with a haystack of essays or noise; a sample is the same at every context length.

    Attributes:
        step_lines: number of lines that NVIDIA's scripts remove at a time until a prompt fits, at context lengths of at
            least `SHORT_TOKENS`.
    """

    options: Any
    step_lines: int

    def __init__(self, options: RulerOptions, **setting: Any) -> None:
        super().__init__(options, **setting)
        self._inline = getattr(options, "type_haystack", None) == "essay"
        self._drafts: dict[int, HaystackDraft] = {}

    def draft(self, index: int, context_length: int) -> HaystackDraft:
        """Makes sample `index`, which is the same at every length."""
        if index not in self._drafts:
            self._drafts[index] = self._make(index)
        return self._drafts[index]

    @abstractmethod
    def _make(self, index: int) -> HaystackDraft: ...

    def steps(self, length: int) -> Steps | None:
        """Returns NVIDIA's steps: 500 words of essays, otherwise `step_lines` lines, or 5 at a short context length."""
        if self._inline:
            return Steps(500)
        return Steps(self.step_lines if length >= SHORT_TOKENS else 5)

    def _depths(self, rng: random.Random, count: int) -> list[float]:
        """Draws `count` relative depths from 0 to 1: for essays from RULER's list of 40 depths, otherwise uniformly."""
        if self._inline:
            return [depth / 100 for depth in rng.sample(DEPTHS, count)]
        return [rng.random() for _ in range(count)]

    @functools.cached_property
    def _shared_haystack(self) -> Haystack:
        """The haystack that all samples share: essays or noise."""
        if self._inline:
            return load_essays(self.options.essays).haystack(self.counter)
        line = niah_wording().noise + "\n"
        return NoiseHaystack(line=line, line_tokens=int(self.counter.count_segments([line])[0]))


class NeedleGenerator(HaystackGenerator):
    """Makes samples whose answers are values in needles.

    Attributes:
        has_single_answer: whether a sample has exactly one answer, which a teacher-forced task can score.
    """

    has_single_answer = True
    step_lines = 25

    @abstractmethod
    def value_in_needle(self, value: str) -> str:
        """Returns a value with the characters around it in its needle; this text occurs nowhere else in the prompt."""

    @abstractmethod
    def other_value(self, index: int, value: str, rng: random.Random) -> str:
        """Draws a value that does not occur in sample `index`."""

    @abstractmethod
    def guess_nats(self) -> float:
        """Returns the NLL of a random guess, in nats."""

    def split_reference(self, reference: str) -> tuple[str, str]:
        """Splits a right answer into a start, which a teacher-forced task puts into the prompt, and the scored rest."""
        return "", reference

    def placed(self, index: int, needles: Sequence[str], queried: Container[int], first: int) -> list[Insert]:
        """Returns the needles at random depths, sorted by depth.

        Args:
            index: index of the sample.
            needles: texts of the needles.
            queried: indices of the needles that the question is about.
            first: index of the needle to which the option `depths` applies.
        """
        fractions = self._depths(seeded_random(*self._name, index, "depths"), len(needles))
        if (depths := self.options.depths) is not None:
            fractions[first] = depths[index % len(depths)] / 100
        end = "" if self._inline else "\n"
        inserts = [
            Insert(text=needle + end, fraction=fraction, is_queried=number in queried)
            for number, (needle, fraction) in enumerate(zip(needles, fractions, strict=True))
        ]
        return sorted(inserts, key=lambda insert: insert.fraction)


class NiahGenerator(NeedleGenerator):
    """Makes the samples of one needle task.

    Raises:
        UserError: the options ask for more needles than essays have depths.
    """

    options: NiahOptions

    def __init__(self, options: NiahOptions, *, task: str, **setting: Any) -> None:
        super().__init__(options, task=task, **setting)
        self.keys = max(options.num_needle_k, options.num_needle_q)
        self.has_single_answer = options.num_needle_q * options.num_needle_v == 1
        self._wording = niah_wording()
        if self._inline and self.keys * options.num_needle_v > len(DEPTHS):
            raise UserError(f"{task} has {len(DEPTHS)} depths in essays, so at most that many needles; set fewer.")

    def needle(self, key: str, value: str) -> str:
        """Returns the sentence of a needle; as in RULER, its noun is plural ("numbers") although it names one value."""
        return self._wording.needle.format(type_needle_v=self.options.type_needle_v, key=key, value=value)

    def value_in_needle(self, value: str) -> str:
        """Returns a value with the characters around it in its needle."""
        return f": {value}."

    def other_value(self, index: int, value: str, rng: random.Random) -> str:
        """Draws a value that does not occur in the sample."""
        return draw_distinct(self.options.type_needle_v, 1, rng, {value} | self.haystack_strings)[0]

    def guess_nats(self) -> float:
        """Returns the NLL of a random guess among all values, in nats."""
        return log_count(self.options.type_needle_v)

    def _make(self, index: int) -> HaystackDraft:
        rng = seeded_random(*self._name, index, "needles")
        options = self.options
        per_key = self.options.num_needle_v
        keys = draw_distinct(options.type_needle_k, self.keys, rng, self.haystack_strings)
        values = draw_distinct(options.type_needle_v, self.keys * per_key, rng, self.haystack_strings)
        values_of = {key: values[i * per_key :][:per_key] for i, key in enumerate(keys)}
        queried = rng.sample(keys, options.num_needle_q)
        needles = [(key, value) for key in keys for value in values_of[key]]
        rng.shuffle(needles)
        query = ", ".join(queried[:-1]) + ", and " + queried[-1] if len(queried) > 1 else queried[0]
        template, noun = self._template
        opening, closing = template.split("{context}")
        prefix = self._wording.prefix_one if self.has_single_answer else self._wording.prefix_many
        return HaystackDraft(
            references=[value for key in queried for value in values_of[key]],
            answer_prefix=prefix.format(type_needle_v=noun, query=query),
            opening=[opening.format(type_needle_v=noun)],
            closing=("\n" if self._inline else "") + closing.removeprefix("\n").format(type_needle_v=noun, query=query),
            haystack=self._make_haystack(index),
            inserts=self.placed(
                index,
                [self.needle(key, value) for key, value in needles],
                {i for i, (key, _) in enumerate(needles) if key in queried},
                next(i for i, (key, _) in enumerate(needles) if key == queried[0]),
            ),
            least_units=len(needles),
            most_units=POOL_LINES if self.options.type_haystack == "needle" else None,
            counter=self.counter,
        )

    @functools.cached_property
    def _template(self) -> tuple[str, str]:
        """RULER's prompt template and the noun for values; both are singular if the question asks for one value."""
        template = self._wording.template
        noun = str(self.options.type_needle_v)
        if not self.has_single_answer:
            return template, noun
        for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
            template = template.replace(plural, singular)
        return template, noun[:-1]

    @property
    def haystack_strings(self) -> frozenset[str]:
        """Keys and values in a haystack of needles; a sample's needles must have other keys and values."""
        return self._pool[1] if self.options.type_haystack == "needle" else frozenset()

    @functools.cached_property
    def _pool(self) -> tuple[list[str], frozenset[str], NDArray[np.int64]]:
        """The lines of a haystack of needles, their keys and values, and their token counts."""
        rng = seeded_random(*self._name, "pool")
        keys = draw_distinct(self.options.type_needle_k, POOL_LINES, rng, frozenset())
        values = [draw(self.options.type_needle_v, rng) for _ in keys]
        lines = [self.needle(key, value) + "\n" for key, value in zip(keys, values, strict=True)]
        key_tokens = self.counter.count_pool([" " + key for key in keys], _KEYS)
        value_tokens = self.counter.count_pool([" " + value for value in values], _VALUES)
        rest = self.counter.count_segments(lines[:1])[0] - key_tokens[0] - value_tokens[0]
        return lines, frozenset((*keys, *values)), rest + key_tokens + value_tokens

    def _make_haystack(self, index: int) -> Haystack:
        if self.options.type_haystack != "needle":
            return self._shared_haystack
        lines, _, tokens = self._pool
        order = seeded_order(len(lines), *self._name, index, "haystack")
        return LineHaystack(pool=lines, order=order, cumulative_tokens=running_totals(tokens[order]))


class VtGenerator(HaystackGenerator):
    """Makes the samples of variable tracking."""

    options: VtOptions
    step_lines = 10

    @functools.cached_property
    def _wording(self) -> TaskWording:
        """RULER's wording; with `scripts: nvidia` the answer prefix has no spelling mistake and ends with a space."""
        wording = task_wording("vt")
        if self.options.scripts != "nvidia":
            return wording
        return wording._replace(answer_prefix=wording.answer_prefix.replace("assgined", "assigned") + " ")

    def _chains(self, rng: random.Random, letters: int, hops: int) -> list[list[str]]:
        """Draws, for every chain of assignments, the names of its variables in the order of assignment."""
        chains = self.options.num_chains
        names = distinct(chains * (hops + 1), lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)))
        return [names[i::chains] for i in range(chains)]

    def _make(self, index: int) -> HaystackDraft:
        rng = seeded_random(*self._name, index, "chains")
        chains = self._chains(rng, 5, self.options.num_hops)
        values = rng.sample(range(10000, 100000), len(chains))
        lines = [_statements(chain, str(value)) for chain, value in zip(chains, values, strict=True)]
        depths = seeded_random(*self._name, index, "depths")
        inserts = self._inserts(lines, sorted(self._depths(depths, sum(map(len, chains)))), depths)
        return HaystackDraft(
            references=chains[0],
            answer_prefix=self._wording.answer_prefix.format(query=values[0], num_v=self.options.num_hops + 1),
            opening=[*self._demonstrations(index), self._wording.opening],
            closing=("\n" if self._inline else "") + self._question(str(values[0])),
            haystack=self._shared_haystack,
            inserts=inserts,
            least_units=len(inserts),
            apart=not self._inline,
            counter=self.counter,
        )

    def _question(self, value: str) -> str:
        return self._wording.closing.removeprefix("\n").format(query=value)

    def _inserts(self, chains: Sequence[Sequence[str]], fractions: Sequence[float], rng: random.Random) -> list[Insert]:
        """Returns all assignments as inserts at the depths `fractions`.

        The assignments of a chain keep their order; those of different chains are interleaved at random.
        """
        turns = [number for number, chain in enumerate(chains) for _ in chain]
        rng.shuffle(turns)
        rest = [list(chain) for chain in chains]
        statements = [(rest[turn].pop(0), turn == 0) for turn in turns]  # the question is about the first chain
        return [
            Insert(text=text.strip() + "." if self._inline else text + "\n", fraction=fraction, is_queried=is_queried)
            for (text, is_queried), fraction in zip(statements, fractions, strict=True)
        ]

    @functools.cached_property
    def _demonstration_units(self) -> int:
        """Number of noise lines, or of essay words, in the worked example.

        As in RULER, it is the largest number with which the example fits into 500 tokens. It is at least 50 words, or
        five lines and as many lines as there are assignments.
        """
        statements = self.options.num_chains * (self._demonstration_hops + 1)
        least = _LEAST_DEMONSTRATION_WORDS if self._inline else max(_LEAST_DEMONSTRATION_LINES, statements)
        sizes = range(least, max(least, DEMONSTRATION_TOKENS) + 1)
        fitting = bisect.bisect_right(sizes, DEMONSTRATION_TOKENS, key=self._demonstration_tokens)
        return sizes[max(0, fitting - 1)]

    @property
    def _demonstration_hops(self) -> int:
        return min(self.options.num_hops, _MOST_DEMONSTRATION_HOPS)

    def _demonstration_tokens(self, units: int) -> int:
        segments = self._demonstration_segments(seeded_random(*self._name, "demonstration"), units)
        example = "".join(segments)
        answer = segments[-1].rsplit(": ", 1)[1]
        without_answer = example[: example.rindex(answer)].rstrip()  # RULER does not count the answer
        return int(self.counter.count_segments([without_answer])[0])

    def _demonstrations(self, index: int) -> list[str]:
        names = [(index, "demonstration", *([shot] if shot else [])) for shot in range(self.options.num_fewshot)]
        rngs = [seeded_random(*self._name, *name) for name in names]
        return [segment for rng in rngs for segment in self._demonstration_segments(rng, self._demonstration_units)]

    def _demonstration_segments(self, rng: random.Random, units: int) -> list[str]:
        """Writes one worked example, with as many chains of assignments as the sample has."""
        hops = self._demonstration_hops
        chains = self._chains(rng, 3, hops)
        count = sum(map(len, chains))
        values = distinct(len(chains), lambda: str(rng.randrange(10000, 100000)))
        queried_value = values[0]
        statements = [_statements(chain, value) for chain, value in zip(chains, values, strict=True)]
        places = seeded_random(*self._name, "demonstration", units)
        answer = self._wording.answer_prefix.format(query=queried_value, num_v=hops + 1)
        ending = f"{self._question(queried_value)} {answer} {' '.join(chains[0])}\n\n"
        if self._inline:
            inserts = self._inserts(statements, sorted(self._depths(places, count)), rng)
            before = [self._shared_haystack.insertion(insert.fraction, units) for insert in inserts]
            body = with_inserts(self._shared_haystack, inserts, before, units)
            return [self._wording.opening, body + "\n", ending]
        positions = sorted(places.sample(range(units), count))
        noise = niah_wording().noise + "\n"
        segments = [self._wording.opening]
        last = 0
        for insert, position in zip(self._inserts(statements, positions, rng), positions, strict=True):
            segments += [noise] * (position - last) + [insert.text]
            last = position
        return [*segments, *[noise] * (units - last), ending]


def _statements(names: Sequence[str], value: str) -> list[str]:
    """Returns the assignments of one chain; as in RULER, a space follows an assignment of a variable to a variable."""
    return [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names)]
