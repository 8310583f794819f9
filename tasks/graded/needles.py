"""Graded needles: what is the password of one object, in a text that names those of none, few or many others?

- basic: no other needle in the text
- easy: one line of eight is a needle with another key
- medium: every line is a needle
- hard: every line is a needle, and the keys of 16 more share a word with the queried key

Where other needles are in the text, three of them hold the wrong choices, at the same depths at every level. At hard
their keys share a word with the queried key. At basic the right choice is the only one in the text.
"""

import functools
import random
from typing import Any, NamedTuple

from sbeval.errors import UserError
from sbeval.tasks.draws import seeded_random
from sbeval.tasks.graded.forms import Question
from sbeval.tasks.graded.haystack import GradedHaystackGenerator
from sbeval.tasks.graded.options import GradedNeedleOptions
from sbeval.tasks.graded.texts import (
    BLOCK_LINES,
    Vocabulary,
    filler_lines,
    needle,
    needle_lines,
    password,
    vocabulary,
)
from sbeval.tasks.ruler.drafts import Insert

_FEW = 8
_WRONG = 3
MOST_NEAR_KEYS = 32
"""Near keys that are drawn for each sample; a level uses the first ones."""


class Drawn(NamedTuple):
    """The draws of a sample, the same at every level.

    Attributes:
        key: the key that the question is about.
        value: its value.
        depth: relative depth of the needle, 0 to 1.
        near: needles whose keys share a word with the key, each with its relative depth. The first three hold `wrong`.
        unlike: for each wrong value, a needle that holds it and whose key shares no word with the key, with the
            relative depth of the near needle that holds it.
        wrong: three values of other needles.
    """

    key: str
    value: str
    depth: float
    near: list[tuple[str, float]]
    unlike: list[tuple[str, float]]
    wrong: list[str]


class GradedNeedleGenerator(GradedHaystackGenerator):
    """Makes the samples of graded needles.

    Raises:
        UserError: there are more near keys than are drawn for a sample.
    """

    options: GradedNeedleOptions
    opening = "The lines of this text describe things. Some may say the password of a thing.\n"

    def __init__(self, options: GradedNeedleOptions, *, task: str, **setting: Any) -> None:
        super().__init__(options, task=task, **setting)
        if options.near_keys > MOST_NEAR_KEYS:
            raise UserError(f"near_keys is {options.near_keys}, and a sample has at most {MOST_NEAR_KEYS}: lower it.")

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return vocabulary(*self._name)

    def lines(self, block: int) -> list[str]:
        """Returns a block of the haystack's lines: filler, or needles with other keys."""
        filler = filler_lines(self._vocabulary, block, *self._name)
        if self.options.others == "none":
            return filler
        needles = needle_lines(self._vocabulary, block, *self._name)
        share = 1 if self.options.others == "all" else _FEW
        return [needles[i] if i % share == 0 else filler[i] for i in range(BLOCK_LINES)]

    def inserts(self, index: int) -> list[Insert]:
        """Returns the needle of the question, and those beside it."""
        drawn = self.drawn(index)
        others = drawn.near[: self.options.near_keys]
        if self.options.others != "none":
            others += drawn.unlike[len(others) :]
        inserts = [Insert(text=f"{text}\n", fraction=depth, is_queried=False) for text, depth in others]
        needed = Insert(text=f"{needle(drawn.key, drawn.value)}\n", fraction=drawn.depth, is_queried=True)
        return [*inserts, needed]

    def drawn(self, index: int) -> Drawn:
        """Draws what the needles of a sample are."""
        rng = seeded_random(*self._name, index, "needle")
        words = self._vocabulary
        adjective, noun = rng.choice(words.queried_adjectives), rng.choice(words.queried_nouns)
        value, depth = password(rng), rng.random()
        wrong = [password(rng) for _ in range(_WRONG)]
        near = self._near(adjective, noun, wrong, rng)
        return Drawn(f"{adjective}-{noun}", value, depth, near, self._unlike(index, noun, wrong, near), wrong)

    def _near(self, adjective: str, noun: str, values: list[str], rng: random.Random) -> list[tuple[str, float]]:
        """Returns needles whose keys share in turn the noun and the adjective; the first have the values `values`."""
        words = self._vocabulary
        adjectives = [word for word in rng.sample(words.queried_adjectives, MOST_NEAR_KEYS + 1) if word != adjective]
        nouns = [word for word in rng.sample(words.queried_nouns, MOST_NEAR_KEYS + 1) if word != noun]
        keys = [f"{adjectives[i]}-{noun}" if i % 2 == 0 else f"{adjective}-{nouns[i]}" for i in range(MOST_NEAR_KEYS)]
        drawn = [*values, *(password(rng) for _ in keys[len(values) :])]
        return [(needle(key, value), rng.random()) for key, value in zip(keys, drawn, strict=True)]

    def _unlike(
        self, index: int, noun: str, values: list[str], near: list[tuple[str, float]]
    ) -> list[tuple[str, float]]:
        """Returns needles with the values `values` and other keys than any line, at the depths of the first `near`."""
        rng = seeded_random(*self._name, index, "unlike keys")
        words = self._vocabulary
        # nouns of queried keys are in no line of the haystack
        nouns = rng.sample([word for word in words.queried_nouns if word != noun], len(values))
        return [
            (needle(f"{rng.choice(words.adjectives)}-{other}", value), depth)
            for other, value, (_, depth) in zip(nouns, values, near, strict=False)
        ]

    def question(self, index: int) -> Question:
        """Returns the question of a sample, the same at every level."""
        drawn = self.drawn(index)
        return Question(
            text=f"What is the password of {drawn.key}?",
            answers=[drawn.value],
            evidence=needle(drawn.key, drawn.value),
            first_step="copies the line of the text that says it",
            wrong=drawn.wrong,
        )
