"""Graded variables: which boxes hold a number, directly or since they hold what another box holds?

- basic: one hop, no other boxes
- easy: two hops, and one other chain of boxes
- medium: four hops, and two other chains
- hard: eight hops, and four other chains

A chain has nine boxes. A level with fewer hops leaves boxes out between the first and the last one.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.tasks.draws import seeded_random, short_nouns
from sbeval.tasks.graded.forms import Question, ending, two_by_two
from sbeval.tasks.graded.options import GradedVariablesOptions
from sbeval.tasks.graded.texts import blocks_for, filler_lines, line_order, vocabulary
from sbeval.tasks.ruler.drafts import Generator, HaystackDraft, Insert
from sbeval.tasks.ruler.haystacks import LineHaystack, running_totals

OPENING = "The lines of this text describe things. Some say what a box holds.\n"
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


class GradedVariablesGenerator(Generator):
    """Makes the samples of graded variable tracking.

    Raises:
        UserError: there are more hops or chains than are drawn for a sample.
    """

    options: GradedVariablesOptions

    def __init__(self, options: GradedVariablesOptions, *, task: str, **setting: Any) -> None:
        super().__init__(options, task=task, **setting)
        for name, most in (("hops", MOST_HOPS), ("other_chains", MOST_CHAINS - 1)):
            if (value := getattr(options, name)) > most:
                raise UserError(f"{name} is {value}, and a sample has at most {most}: lower it.")
        self._pool: list[str] = []
        self._pool_tokens: list[NDArray[np.int64]] = []

    def draft(self, index: int, context_length: int) -> HaystackDraft:
        """Makes sample `index`, the same at every length; tokenises only as many lines as the length needs."""
        for block in range(len(self._pool_tokens), blocks_for(context_length)):
            lines = filler_lines(vocabulary(*self._name), block, *self._name)
            self._pool += lines
            self._pool_tokens.append(self.counter.count_pool(lines))
            self._draft.cache_clear()
        return self._draft(index)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - the cache and the generator live as long as the task
    def _draft(self, index: int) -> HaystackDraft:
        end = ending(self.question(index), self.options.form, *self._name, index)
        order = line_order(len(self._pool_tokens), *self._name, index)
        inserts = [
            Insert(text=f"{text}\n", fraction=depth, is_queried=number == 0)
            for number, chain in enumerate(self.chains(index))
            for text, depth in zip(chain.statements(), chain.depths, strict=True)
        ]
        return HaystackDraft(
            references=end.references,
            answer_prefix=end.answer_prefix,
            opening=[OPENING],
            closing=end.closing,
            haystack=LineHaystack(
                pool=self._pool,
                order=order,
                cumulative_tokens=running_totals(np.concatenate(self._pool_tokens)[order]),
            ),
            inserts=sorted(inserts, key=lambda insert: insert.fraction),
            least_units=1,
            most_units=len(order),
            counter=self.counter,
        )

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
