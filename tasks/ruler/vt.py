"""Variable tracking: chains of assignments in a haystack, behind one worked example."""

import bisect
import functools
import itertools
import random
import string
from collections.abc import Sequence

from sbeval.tasks.draws import seeded_random
from sbeval.tasks.ruler.drafts import HaystackDraft, Insert
from sbeval.tasks.ruler.haystacks import Haystack, NoiseHaystack
from sbeval.tasks.ruler.niah import DEPTHS
from sbeval.tasks.ruler.options import VtOptions
from sbeval.tasks.ruler.texts import load_essays
from sbeval.tasks.ruler.wording import niah_wording, vt_wording
from sbeval.tasks.tokens import TokenCounter

DEMONSTRATION_TOKENS = 500
_LEAST_DEMONSTRATION_LINES, _LEAST_DEMONSTRATION_WORDS = 5, 50
_MOST_DEMONSTRATION_HOPS = 10


class VtGenerator:
    """Makes the samples of variable tracking.

    Args:
        options: what is asked.
        task: its name, part of every seed.
        counter: the model's tokenizer.
    """

    def __init__(self, options: VtOptions, *, task: str, counter: TokenCounter) -> None:
        self._inline = options.type_haystack == "essay"
        self._chains = options.num_chains
        self._hops = options.num_hops
        self._shots = options.num_fewshot
        self._essays = options.essays
        self._name = (task, options.seed)
        self._counter = counter
        self._drafts: dict[int, HaystackDraft] = {}
        self._wording = vt_wording(options.scripts)

    def draft(self, index: int, context_length: int) -> HaystackDraft:
        """Makes sample `index`, the same at every length."""
        if index not in self._drafts:
            self._drafts[index] = self._make(index)
        return self._drafts[index]

    def _make(self, index: int) -> HaystackDraft:
        rng = seeded_random(*self._name, index, "chains")
        names = _variables(rng, 5, self._chains * (self._hops + 1))
        values = rng.sample(range(10000, 100000), self._chains)
        chains = [names[i :: self._chains] for i in range(self._chains)]
        lines = [_statements(chain, str(value)) for chain, value in zip(chains, values, strict=True)]
        depths = seeded_random(*self._name, index, "depths")
        inserts = self._inserts(lines, self._fractions(depths, len(names)), depths)
        opening, question = self._question(str(values[0]))
        return HaystackDraft(
            references=chains[0],
            answer_prefix=self._wording.answer_prefix.format(query=values[0], num_v=self._hops + 1),
            opening=[*self._demonstrations(index), opening],
            closing=("\n" if self._inline else "") + question,
            haystack=self._haystack,
            inserts=inserts,
            least_units=len(inserts),
            apart=not self._inline,
            counter=self._counter,
        )

    def _question(self, value: str) -> tuple[str, str]:
        opening, question = self._wording.template.split("{context}")
        return opening, question.removeprefix("\n").format(query=value)

    @functools.cached_property
    def _haystack(self) -> Haystack:
        if self._inline:
            return load_essays(self._essays).haystack(self._counter)
        line = niah_wording().noise + "\n"
        return NoiseHaystack(line=line, line_tokens=int(self._counter.count_pieces([line])[0]))

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
        statements = self._chains * (self._demonstration_hops + 1)
        least = _LEAST_DEMONSTRATION_WORDS if self._inline else max(_LEAST_DEMONSTRATION_LINES, statements)
        sizes = range(least, max(least, DEMONSTRATION_TOKENS) + 1)
        fitting = bisect.bisect_right(sizes, DEMONSTRATION_TOKENS, key=self._demonstration_tokens)
        return sizes[max(0, fitting - 1)]

    @property
    def _demonstration_hops(self) -> int:
        return min(self._hops, _MOST_DEMONSTRATION_HOPS)

    def _demonstration_tokens(self, units: int) -> int:
        pieces = self._demonstration_pieces(seeded_random(*self._name, "demonstration"), units)
        shown = "".join(pieces)
        asked = shown[: shown.rindex(pieces[-1].rsplit(": ", 1)[1])].rstrip()  # without the answer, as RULER has it
        return int(self._counter.count_pieces([asked])[0])

    def _demonstrations(self, index: int) -> list[str]:
        pieces: list[str] = []
        for shot in range(self._shots):
            name = (*self._name, index, "demonstration", *([shot] if shot else []))
            pieces += self._demonstration_pieces(seeded_random(*name), self._demonstration_units)
        return pieces

    def _demonstration_pieces(self, rng: random.Random, units: int) -> list[str]:
        """Writes one worked example with as many chains as the question behind it."""
        hops = self._demonstration_hops
        names = _variables(rng, 3, self._chains * (hops + 1))
        values: dict[str, None] = {}
        while len(values) < self._chains:
            values[str(rng.randrange(10000, 100000))] = None
        asked = next(iter(values))
        chains = [names[i :: self._chains] for i in range(self._chains)]
        statements = [_statements(chain, value) for chain, value in zip(chains, values, strict=True)]
        opening, question = self._question(asked)
        places = seeded_random(*self._name, "demonstration", units)
        answer = self._wording.answer_prefix.format(query=asked, num_v=hops + 1)
        ending = f"{question} {answer} {' '.join(chains[0])}\n\n"
        if self._inline:
            inserts = self._inserts(statements, self._fractions(places, len(names)), rng)
            draft = HaystackDraft(
                references=(),
                answer_prefix="",
                opening=(),
                closing="",
                haystack=self._haystack,
                inserts=inserts,
                least_units=units,
                counter=self._counter,
            )
            return [opening, draft.body(units) + "\n", ending]
        positions = sorted(places.sample(range(units), len(names)))
        noise = niah_wording().noise + "\n"
        pieces = [opening]
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
