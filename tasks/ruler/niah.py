"""What lies in a haystack: needles (the eight NIAH tasks), or chains of variables behind a worked example."""

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
"""Below this length NVIDIA's scripts take smaller steps where the haystack is lines."""
_KEYS, _VALUES = ("for", " is"), (":", ".\nA")
DEPTHS = tuple(round(100 * i / 39) for i in range(40))
DEMONSTRATION_TOKENS = 500
_LEAST_DEMONSTRATION_LINES, _LEAST_DEMONSTRATION_WORDS = 5, 50
_MOST_DEMONSTRATION_HOPS = 10


class HaystackGenerator(Generator):
    """Makes samples that are the same at every length, in essays or noise.

    Attributes:
        step_lines: lines of a step of NVIDIA's scripts from `SHORT_TOKENS` on.
    """

    options: Any
    step_lines: int

    def __init__(self, options: RulerOptions, **setting: Any) -> None:
        super().__init__(options, **setting)
        self._inline = getattr(options, "type_haystack", None) == "essay"
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
        if self._inline:
            return Steps(500)
        return Steps(self.step_lines if length >= SHORT_TOKENS else 5)

    def _depths(self, rng: random.Random, count: int) -> list[float]:
        """Draws relative depths: some of RULER's own in essays, any elsewhere."""
        if self._inline:
            return [depth / 100 for depth in rng.sample(DEPTHS, count)]
        return [rng.random() for _ in range(count)]

    @functools.cached_property
    def _shared_haystack(self) -> Haystack:
        """The haystack of all samples: essays or noise."""
        if self._inline:
            return load_essays(self.options.essays).haystack(self.counter)
        line = niah_wording().noise + "\n"
        return NoiseHaystack(line=line, line_tokens=int(self.counter.count_pieces([line])[0]))


class NeedleGenerator(HaystackGenerator):
    """Makes samples whose answers stand in needles.

    Attributes:
        asks_one: whether there is one answer, which can be scored under a model and replaced in its needle.
    """

    asks_one = True
    step_lines = 25

    @abstractmethod
    def value_in_needle(self, value: str) -> str:
        """Returns a value as its needle shows it, and as nothing else in a prompt does."""

    @abstractmethod
    def other_value(self, index: int, value: str, rng: random.Random) -> str:
        """Draws a value that is nowhere in sample `index`."""

    @abstractmethod
    def guess_nats(self) -> float:
        """Returns the NLL of a guess, in nats."""

    def given(self, reference: str) -> tuple[str, str]:
        """Returns what the prompt of a scored answer tells of the reference, and the answer that remains."""
        return "", reference

    def placed(self, index: int, needles: Sequence[str], asked: Container[int], first: int) -> list[Insert]:
        """Places needles, of which those asked for are recorded; the depths that are set are those of the first."""
        fractions = self._depths(seeded_random(*self._name, index, "depths"), len(needles))
        if (depths := self.options.depths) is not None:
            fractions[first] = depths[index % len(depths)] / 100
        end = "" if self._inline else "\n"
        inserts = [
            Insert(text=needle + end, fraction=fraction, asked=number in asked)
            for number, (needle, fraction) in enumerate(zip(needles, fractions, strict=True))
        ]
        return sorted(inserts, key=lambda insert: insert.fraction)


class NiahGenerator(NeedleGenerator):
    """Makes the samples of one needle task."""

    options: NiahOptions

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

    def other_value(self, index: int, value: str, rng: random.Random) -> str:
        """Draws a value that is nowhere in the sample."""
        return draw_distinct(self.options.type_needle_v, 1, rng, {value} | self.haystack_strings)[0]

    def guess_nats(self) -> float:
        """Returns the NLL of a guess among all values."""
        return log_count(self.options.type_needle_v)

    def _make(self, index: int) -> HaystackDraft:
        rng = seeded_random(*self._name, index, "needles")
        options = self.options
        each = self.options.num_needle_v
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
            inserts=self.placed(
                index,
                [self.needle(key, value) for key, value in needles],
                {i for i, (key, _) in enumerate(needles) if key in asked},
                next(i for i, (key, _) in enumerate(needles) if key == asked[0]),
            ),
            least_units=len(needles),
            most_units=POOL_LINES if self.options.type_haystack == "needle" else None,
            counter=self.counter,
        )

    @functools.cached_property
    def _template(self) -> tuple[str, str]:
        """Template and noun, in RULER's singular where one value is asked for."""
        template = self._wording.template
        noun = str(self.options.type_needle_v)
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
        key_tokens = self.counter.count_pool([" " + key for key in keys], _KEYS)
        value_tokens = self.counter.count_pool([" " + value for value in values], _VALUES)
        rest = self.counter.count_pieces(lines[:1])[0] - key_tokens[0] - value_tokens[0]
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
        """RULER's words; the answer prefix of NVIDIA's scripts is spelt right and ends with a space."""
        wording = task_wording("vt")
        if self.options.scripts != "nvidia":
            return wording
        return wording._replace(answer_prefix=wording.answer_prefix.replace("assgined", "assigned") + " ")

    def _chains(self, rng: random.Random, letters: int, hops: int) -> list[list[str]]:
        """Draws the variables of every chain, in their order."""
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
        """Places the statements: each chain in its order, chains mixed at random."""
        turns = [number for number, chain in enumerate(chains) for _ in chain]
        rng.shuffle(turns)
        rest = [list(chain) for chain in chains]
        placed = [(rest[turn].pop(0), turn == 0) for turn in turns]
        ended = [(text.strip() + "." if self._inline else text + "\n", asked) for text, asked in placed]
        pairs = zip(ended, fractions, strict=True)
        return [Insert(text=text, fraction=fraction, asked=asked) for (text, asked), fraction in pairs]

    @functools.cached_property
    def _demonstration_units(self) -> int:
        """Returns how many lines of noise or words of essays the worked example has.

        RULER gives it as many as fit 500 tokens, at least five lines or 50 words.
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
        pieces = self._demonstration_pieces(seeded_random(*self._name, "demonstration"), units)
        shown = "".join(pieces)
        asked = shown[: shown.rindex(pieces[-1].rsplit(": ", 1)[1])].rstrip()  # without the answer, as RULER has it
        return int(self.counter.count_pieces([asked])[0])

    def _demonstrations(self, index: int) -> list[str]:
        names = [(index, "demonstration", *([shot] if shot else [])) for shot in range(self.options.num_fewshot)]
        rngs = [seeded_random(*self._name, *name) for name in names]
        return [piece for rng in rngs for piece in self._demonstration_pieces(rng, self._demonstration_units)]

    def _demonstration_pieces(self, rng: random.Random, units: int) -> list[str]:
        """Writes one worked example with as many chains as the question behind it."""
        hops = self._demonstration_hops
        chains = self._chains(rng, 3, hops)
        count = sum(map(len, chains))
        values = distinct(len(chains), lambda: str(rng.randrange(10000, 100000)))
        asked = values[0]
        statements = [_statements(chain, value) for chain, value in zip(chains, values, strict=True)]
        places = seeded_random(*self._name, "demonstration", units)
        answer = self._wording.answer_prefix.format(query=asked, num_v=hops + 1)
        ending = f"{self._question(asked)} {answer} {' '.join(chains[0])}\n\n"
        if self._inline:
            inserts = self._inserts(statements, sorted(self._depths(places, count)), rng)
            before = [self._shared_haystack.insertion(insert.fraction, units) for insert in inserts]
            body = with_inserts(self._shared_haystack, inserts, before, units)
            return [self._wording.opening, body + "\n", ending]
        positions = sorted(places.sample(range(units), count))
        noise = niah_wording().noise + "\n"
        pieces = [self._wording.opening]
        last = 0
        for insert, position in zip(self._inserts(statements, positions, rng), positions, strict=True):
            pieces += [noise] * (position - last) + [insert.text]
            last = position
        return [*pieces, *[noise] * (units - last), ending]


def _statements(names: Sequence[str], value: str) -> list[str]:
    """Returns the assignments of one chain; RULER ends those of variables with a space."""
    return [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names)]
