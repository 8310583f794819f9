"""Graded variables: which boxes hold a number, directly or since they hold what another box holds?

- basic: one hop, no other boxes
- easy: two hops, and one other chain of boxes
- medium: four hops, and two other chains
- hard: eight hops, and four other chains

A chain has nine boxes. A level with fewer hops leaves boxes out between the first and the last one.
"""

from typing import Any, NamedTuple

from sbeval.errors import UserError
from sbeval.tasks.draws import seeded_random, short_nouns
from sbeval.tasks.graded.forms import Question, two_by_two
from sbeval.tasks.graded.haystack import GradedHaystackGenerator
from sbeval.tasks.graded.options import GradedVariablesOptions
from sbeval.tasks.graded.texts import filler_lines, vocabulary
from sbeval.tasks.ruler.drafts import Insert

MOST_HOPS = 8
MOST_CHAINS = 8


class Chain(NamedTuple):
    """Boxes that hold one number, the first directly and each other one through the box before it.

    Attributes:
        value: the number.
        names: names of the boxes, in their order in the text.
        depths: relative depths of their lines, 0 to 1, ascending.
    """

    value: str
    names: list[str]
    depths: list[float]

    def statements(self) -> list[str]:
        """Returns the sentence about each box."""
        held = [self.value, *(f"what box {name} holds" for name in self.names)]
        return [f"Box {name} holds {what}." for name, what in zip(self.names, held, strict=False)]


class GradedVariablesGenerator(GradedHaystackGenerator):
    """Makes the samples of graded variable tracking.

    Raises:
        UserError: there are more hops or chains than are drawn for a sample.
    """

    options: GradedVariablesOptions
    opening = "The lines of this text describe things. Some say what a box holds.\n"

    def __init__(self, options: GradedVariablesOptions, *, task: str, **setting: Any) -> None:
        super().__init__(options, task=task, **setting)
        for name, most in (("hops", MOST_HOPS), ("other_chains", MOST_CHAINS - 1)):
            if (value := getattr(options, name)) > most:
                raise UserError(f"{name} is {value}, and a sample has at most {most}: lower it.")

    def lines(self, block: int) -> list[str]:
        """Returns one block of filler lines."""
        return filler_lines(vocabulary(*self._name), block, *self._name)

    def inserts(self, index: int) -> list[Insert]:
        """Returns the line about each box; those of the first chain are the answer."""
        return [
            Insert(text=f"{text}\n", fraction=depth, is_queried=number == 0)
            for number, chain in enumerate(self.chains(index))
            for text, depth in zip(chain.statements(), chain.depths, strict=True)
        ]

    def _all_chains(self, index: int) -> list[Chain]:
        """Draws all chains of a sample with all their boxes, the same at every level."""
        rng = seeded_random(*self._name, index, "boxes")
        boxes = MOST_HOPS + 1
        names = rng.sample(short_nouns(), MOST_CHAINS * boxes)
        values = rng.sample(range(10000, 100000), MOST_CHAINS)
        return [
            Chain(str(value), names[i * boxes : (i + 1) * boxes], sorted(rng.random() for _ in range(boxes)))
            for i, value in enumerate(values)
        ]

    def _shortened(self, chain: Chain) -> Chain:
        """Returns a chain with only the boxes of this level, which are evenly spread over the chain."""
        hops = self.options.hops
        kept = [round(i * MOST_HOPS / hops) for i in range(hops + 1)]
        return Chain(chain.value, [chain.names[i] for i in kept], [chain.depths[i] for i in kept])

    def chains(self, index: int) -> list[Chain]:
        """Returns the chains of a sample at this level; the question is about the first one."""
        return [self._shortened(chain) for chain in self._all_chains(index)[: 1 + self.options.other_chains]]

    def question(self, index: int) -> Question:
        """Returns the question of a sample; its answer depends on the level's number of hops."""
        right, first, last = map(self._shortened, self._all_chains(index)[:3])
        places = [(right.names[0], first.names[0]), (right.names[-1], last.names[-1])]
        return Question(
            text=(
                f"Which {len(right.names)} boxes hold {right.value}, directly or through other boxes? Name them in the "
                "order of their lines, with commas between them."
            ),
            answers=[", ".join(right.names)],
            evidence=" ".join(right.statements()),
            first_step="copies the lines about these boxes in their order",
            wrong=two_by_two(places, lambda pair: ", ".join([pair[0], *right.names[1:-1], pair[1]])),
        )
