"""Variable tracking: chains of assignments in a haystack, behind one worked example."""

import bisect
import functools
import itertools
import random
import string
from collections.abc import Sequence

from sbeval.tasks.draws import seeded_random
from sbeval.tasks.ruler.drafts import HaystackDraft, Insert
from sbeval.tasks.ruler.niah import DEPTHS, HaystackGenerator
from sbeval.tasks.ruler.options import VtOptions
from sbeval.tasks.ruler.wording import TaskWording, niah_wording, task_wording

DEMONSTRATION_TOKENS = 500
_LEAST_DEMONSTRATION_LINES, _LEAST_DEMONSTRATION_WORDS = 5, 50
_MOST_DEMONSTRATION_HOPS = 10


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

    def _variables_of(self, rng: random.Random, letters: int, hops: int) -> list[list[str]]:
        """Draws the variables of every chain, in their order."""
        names = _variables(rng, letters, self.options.num_chains * (hops + 1))
        return [names[i :: self.options.num_chains] for i in range(self.options.num_chains)]

    def _make(self, index: int) -> HaystackDraft:
        rng = seeded_random(*self._name, index, "chains")
        chains = self._variables_of(rng, 5, self.options.num_hops)
        values = rng.sample(range(10000, 100000), len(chains))
        lines = [_statements(chain, str(value)) for chain, value in zip(chains, values, strict=True)]
        depths = seeded_random(*self._name, index, "depths")
        inserts = self._inserts(lines, self._fractions(depths, sum(map(len, chains))), depths)
        return HaystackDraft(
            references=chains[0],
            answer_prefix=self._wording.answer_prefix.format(query=values[0], num_v=self.options.num_hops + 1),
            opening=[*self._demonstrations(index), self._wording.opening],
            closing=("\n" if self._inline else "") + self._question(str(values[0])),
            haystack=self._shared_haystack,
            inserts=inserts,
            least_units=len(inserts),
            apart=not self._inline,
            counter=self._counter,
        )

    def _question(self, value: str) -> str:
        return self._wording.closing.removeprefix("\n").format(query=value)

    def _fractions(self, rng: random.Random, count: int) -> list[float]:
        """Draws relative depths, ascending."""
        if self._inline:
            return sorted(depth / 100 for depth in rng.sample(DEPTHS, count))
        return sorted(rng.random() for _ in range(count))

    def _inserts(self, chains: Sequence[Sequence[str]], fractions: Sequence[float], rng: random.Random) -> list[Insert]:
        """Places the statements: each chain in its order, chains mixed at random."""
        turns = [number for number, chain in enumerate(chains) for _ in chain]
        rng.shuffle(turns)
        rest = [list(chain) for chain in chains]
        placed = [(rest[turn].pop(0), turn == 0) for turn in turns]
        texts = [text.strip() + "." if self._inline else text + "\n" for text, _ in placed]
        return [
            Insert(text=text, fraction=fraction, asked=asked)
            for text, fraction, (_, asked) in zip(texts, fractions, placed, strict=True)
        ]

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
        return int(self._counter.count_pieces([asked])[0])

    def _demonstrations(self, index: int) -> list[str]:
        pieces: list[str] = []
        for shot in range(self.options.num_fewshot):
            name = (*self._name, index, "demonstration", *([shot] if shot else []))
            pieces += self._demonstration_pieces(seeded_random(*name), self._demonstration_units)
        return pieces

    def _demonstration_pieces(self, rng: random.Random, units: int) -> list[str]:
        """Writes one worked example with as many chains as the question behind it."""
        hops = self._demonstration_hops
        chains = self._variables_of(rng, 3, hops)
        count = sum(map(len, chains))
        values: dict[str, None] = {}
        while len(values) < len(chains):
            values[str(rng.randrange(10000, 100000))] = None
        asked = next(iter(values))
        statements = [_statements(chain, value) for chain, value in zip(chains, values, strict=True)]
        places = seeded_random(*self._name, "demonstration", units)
        answer = self._wording.answer_prefix.format(query=asked, num_v=hops + 1)
        ending = f"{self._question(asked)} {answer} {' '.join(chains[0])}\n\n"
        if self._inline:
            inserts = self._inserts(statements, self._fractions(places, count), rng)
            draft = HaystackDraft(
                references=(),
                answer_prefix="",
                opening=(),
                closing="",
                haystack=self._shared_haystack,
                inserts=inserts,
                least_units=units,
                counter=self._counter,
            )
            return [self._wording.opening, draft.body(units) + "\n", ending]
        positions = sorted(places.sample(range(units), count))
        noise = niah_wording().noise + "\n"
        pieces = [self._wording.opening]
        last = 0
        for insert, position in zip(self._inserts(statements, positions, rng), positions, strict=True):
            pieces += [noise] * (position - last) + [insert.text]
            last = position
        return [*pieces, *[noise] * (units - last), ending]


def _variables(rng: random.Random, letters: int, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    return list(names)


def _statements(names: Sequence[str], value: str) -> list[str]:
    """Returns the assignments of one chain; RULER ends those of variables with a space."""
    return [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names)]
