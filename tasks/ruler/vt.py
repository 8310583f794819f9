"""Variable tracking: chains of assignments in a haystack, behind one worked example."""

import functools
import itertools
import random
import string
from collections.abc import Sequence

from sbeval.tasks.ruler.choices import Choices
from sbeval.tasks.ruler.drafts import HaystackDraft, Insert
from sbeval.tasks.ruler.essays import load_essays
from sbeval.tasks.ruler.haystacks import Haystack, NoiseHaystack
from sbeval.tasks.ruler.niah import DEPTHS
from sbeval.tasks.ruler.seeding import seeded_random
from sbeval.tasks.ruler.tokens import TokenCounter
from sbeval.tasks.ruler.wording import niah_wording, vt_wording

DEMONSTRATION_TOKENS = 500
_LEAST_DEMONSTRATION_LINES = 5


class VtGenerator:
    """Makes the samples of variable tracking.

    Args:
        choices: `type_haystack`, `num_chains`, `num_hops` and `num_fewshot`.
        task: its name, part of every seed.
        seed: the run's seed.
        counter: the model's tokenizer.
    """

    def __init__(self, choices: Choices, *, task: str, seed: int, counter: TokenCounter) -> None:
        self._inline = choices.one_of("type_haystack", ("noise", "essay")) == "essay"
        self._chains = choices.count("num_chains")
        self._hops = choices.count("num_hops")
        self._shots = choices.count("num_fewshot", least=0)
        self._essays = choices.path("essays")
        self._name = (task, seed)
        self._counter = counter
        self._drafts: dict[int, HaystackDraft] = {}
        self._wording = vt_wording()

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
        inserts = self._inserts(lines, seeded_random(*self._name, index, "depths"))
        opening, question = self._question(str(values[0]))
        return HaystackDraft(
            references=chains[0],
            answer_prefix=self._wording.answer_prefix.format(query=values[0], num_v=self._hops + 1),
            opening=[*self._demonstrations(index), opening],
            closing=question,
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

    def _inserts(self, chains: Sequence[Sequence[str]], rng: random.Random) -> list[Insert]:
        """Places the statements: each chain in its order, chains mixed at random."""
        total = sum(len(chain) for chain in chains)
        if self._inline:
            fractions = sorted(depth / 100 for depth in rng.sample(DEPTHS, total))
        else:
            fractions = sorted(rng.random() for _ in range(total))
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
    def _demonstration_shape(self) -> tuple[int, list[int]]:
        """Returns noise lines of the worked example and before which of them its statements stand.

        RULER gives it as many lines as fit 500 tokens, at least five.
        """
        lines = max(_LEAST_DEMONSTRATION_LINES, self._hops + 1)
        while self._demonstration_tokens(lines + 1) <= DEMONSTRATION_TOKENS:
            lines += 1
        return lines, self._demonstration_positions(lines)

    def _demonstration_positions(self, lines: int) -> list[int]:
        return sorted(seeded_random(*self._name, "demonstration", lines).sample(range(lines), self._hops + 1))

    def _demonstration_tokens(self, lines: int) -> int:
        rng = seeded_random(*self._name, "demonstration")
        pieces = self._demonstration_pieces(rng, lines, self._demonstration_positions(lines))
        shown = "".join(pieces)
        asked = shown[: shown.rindex(pieces[-1].rsplit(": ", 1)[1])].rstrip()  # without the answer, as RULER has it
        return int(self._counter.count_pieces([asked])[0])

    def _demonstrations(self, index: int) -> list[str]:
        pieces: list[str] = []
        for shot in range(self._shots):
            name = (*self._name, index, "demonstration", *([shot] if shot else []))
            pieces += self._demonstration_pieces(seeded_random(*name), *self._demonstration_shape)
        return pieces

    def _demonstration_pieces(self, rng: random.Random, lines: int, positions: Sequence[int]) -> list[str]:
        names = _variables(rng, 3, self._hops + 1)
        value = str(rng.randrange(10000, 100000))
        opening, question = self._question(value)
        noise = niah_wording().noise + "\n"
        pieces = [opening]
        last = 0
        for statement, position in zip(_statements(names, value), positions, strict=True):
            pieces += [noise] * (position - last) + [statement + "\n"]
            last = position
        pieces += [noise] * (lines - last)
        answer = self._wording.answer_prefix.format(query=value, num_v=self._hops + 1)
        return [*pieces, f"{question} {answer} {' '.join(names)}\n\n"]


def _variables(rng: random.Random, letters: int, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    return list(names)


def _statements(names: Sequence[str], value: str) -> list[str]:
    """Returns the assignments of one chain; RULER ends those of variables with a space."""
    return [f"VAR {names[0]} = {value}"] + [f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names)]
