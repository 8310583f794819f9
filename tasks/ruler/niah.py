"""Generators of tasks with a haystack: the eight needle-in-a-haystack (NIAH) tasks, and variable tracking."""

import bisect
import dataclasses
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
from sbeval.tasks.ruler.absent import MOST_DISTRACTORS, NONE, contains_value, is_absent
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
            self._drafts[index] = self._complete(index, self._make(index))
        return self._drafts[index]

    @abstractmethod
    def _make(self, index: int) -> HaystackDraft: ...

    def _complete(self, index: int, draft: HaystackDraft) -> HaystackDraft:
        """Returns the sample with the changes that options make to samples of several tasks."""
        return draft

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

    def is_absent(self, index: int) -> bool:
        """Whether sample `index` asks for a key that is not in its text."""
        return is_absent(self.options.absent, index, *self._name)

    @abstractmethod
    def asks_for_absent(self, index: int, draft: HaystackDraft, rng: random.Random) -> HaystackDraft:
        """Returns sample `index` with a question about a key that is not in its text; only its texts may change."""

    @abstractmethod
    def says_absence(self, closing: str) -> str:
        """Returns the text after the body, with a sentence on the right answer if the key is not in the text."""

    @abstractmethod
    def holds_value(self, answer: str) -> bool:
        """Whether an answer holds a text that could be a value, in the prompt or not."""

    def candidates(self, index: int, context_length: int) -> list[str]:
        """Returns values in the text of sample `index`; the right one comes first if its key is there."""
        draft = self.draft(index, context_length)
        values = self.needle_values(index)
        if isinstance(draft.haystack, LineHaystack):
            lines = [draft.haystack.pool[i] for i in draft.haystack.order[:MOST_DISTRACTORS].tolist()]
            values = [*values, *filter(None, map(self.value_of_line, lines))]
        return list(dict.fromkeys(values))

    @abstractmethod
    def needle_values(self, index: int) -> list[str]:
        """Returns the values of the needles of sample `index`, that of the key that `_make` asks for first."""

    def value_of_line(self, line: str) -> str | None:
        """Returns the value in a line of a haystack of needles, None if the haystack holds no values."""
        return None

    def _complete(self, index: int, draft: HaystackDraft) -> HaystackDraft:
        if not self.options.absent:
            return draft
        if self.is_absent(index):
            draft = self.asks_for_absent(index, draft, seeded_random(*self._name, index, "absent key"))
            draft = dataclasses.replace(
                draft, inserts=[dataclasses.replace(insert, is_queried=False) for insert in draft.inserts]
            )
        return dataclasses.replace(draft, closing=self.says_absence(draft.closing))

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

    def _drawn(self, index: int) -> tuple[dict[str, list[str]], list[str], list[tuple[str, str]]]:
        """Draws the values of each key, the keys of the question, and the needles (key, value) in random order."""
        rng = seeded_random(*self._name, index, "needles")
        options = self.options
        per_key = self.options.num_needle_v
        keys = draw_distinct(options.type_needle_k, self.keys, rng, self.haystack_strings)
        values = draw_distinct(options.type_needle_v, self.keys * per_key, rng, self.haystack_strings)
        values_of = {key: values[i * per_key :][:per_key] for i, key in enumerate(keys)}
        queried = rng.sample(keys, options.num_needle_q)
        needles = [(key, value) for key in keys for value in values_of[key]]
        rng.shuffle(needles)
        return values_of, queried, needles

    def _question(self, keys: Sequence[str]) -> tuple[str, str]:
        """Returns the text after the body and the beginning of the answer of a question about these keys."""
        query = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
        template, noun = self._template
        closing = template.partition("{context}")[2].removeprefix("\n").format(type_needle_v=noun, query=query)
        prefix = self._wording.prefix_one if self.has_single_answer else self._wording.prefix_many
        return ("\n" if self._inline else "") + closing, prefix.format(type_needle_v=noun, query=query)

    def absent_keys(self, draft: HaystackDraft, rng: random.Random) -> list[str]:
        """Draws as many keys as a question has, none of them in the text."""
        texts = "".join(insert.text for insert in draft.inserts)
        drawn: list[str] = []
        while len(drawn) < self.options.num_needle_q:
            drawn += draw_distinct(self.options.type_needle_k, 1, rng, {*self.haystack_strings, *drawn})
            if drawn[-1] in texts:
                drawn.pop()
        return drawn

    def asks_for_absent(self, index: int, draft: HaystackDraft, rng: random.Random) -> HaystackDraft:
        """Returns the sample with a question about keys that are not in the text."""
        closing, prefix = self._question(self.absent_keys(draft, rng))
        return dataclasses.replace(draft, references=[NONE], closing=closing, answer_prefix=prefix)

    def says_absence(self, closing: str) -> str:
        """Returns the question with a sentence on the right answer if the key is not in the text."""
        return f'{closing} If there is none, the answer is "{NONE}".'

    def holds_value(self, answer: str) -> bool:
        """Whether an answer holds a number, a pair of words with a hyphen, or a UUID, as the values of the task are."""
        return contains_value(self.options.type_needle_v, answer)

    def needle_values(self, index: int) -> list[str]:
        """Returns the values of the needles, those of the first queried key first."""
        values_of, queried, _ = self._drawn(index)
        return [value for key in (queried[0], *values_of) for value in values_of[key]]

    def value_of_line(self, line: str) -> str | None:
        """Returns the value in a line of a haystack of needles."""
        return line.rpartition(": ")[2].rstrip(".\n")

    def _make(self, index: int) -> HaystackDraft:
        values_of, queried, needles = self._drawn(index)
        _, noun = self._template
        closing, prefix = self._question(queried)
        return HaystackDraft(
            references=[value for key in queried for value in values_of[key]],
            answer_prefix=prefix,
            opening=[self._template[0].partition("{context}")[0].format(type_needle_v=noun)],
            closing=closing,
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
