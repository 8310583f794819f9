"""Harder retrieval: needles without a word in common with their question, and the n-th of several similar turns.

The first task follows Modarressi et al., *NoLiMa* (arXiv 2502.05167). The model has to know a fact that connects the
question with the needle: the question names a country, and the needle a place in it. The second task follows MRCR of
Vodrahalli et al., *Michelangelo* (arXiv 2409.12640). The text consists of turns (a request and its reply); the question
asks for the n-th of several replies to the same request. The score is that of OpenAI's data set OpenAI-MRCR. Wording
and lists were written for this project.
"""

import dataclasses
import difflib
import functools
import math
import random
import re
import string
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.tasks.draws import distinct, seeded_order, seeded_random, short_nouns
from sbeval.tasks.recall.options import AssociationOptions, TurnsOptions
from sbeval.tasks.recall.questions import QUESTION, associations, needle
from sbeval.tasks.ruler.absent import NONE, says_none
from sbeval.tasks.ruler.drafts import HaystackDraft
from sbeval.tasks.ruler.families import ForcedNiahTask, NiahTask
from sbeval.tasks.ruler.haystacks import LineHaystack, running_totals
from sbeval.tasks.ruler.niah import DEPTHS, NeedleGenerator

_NAMES = (
    "Alice Boris Carmen Dimitri Elena Farid Greta Hassan Ingrid Jamal Katya Lorenzo Mei Nadia Oskar Priya Quentin Rosa "
    "Stefan Tomoko Ursula Viktor Wanda Xavier Yusuf Zelda Anders Bianca Cedric Dolores Emil Fatima Gustav Helga Igor "
    "Jasmine Klaus Leila Magnus Noor"
)
_PEOPLE = _NAMES.split()
_FORMS = ("poem", "story", "letter", "song", "riddle", "speech", "joke", "prayer")
_REPLY_WORDS = 8
_CODE_LETTERS = 10
_POOL_TURNS = 16384
_TO = " to: "


class AssociationGenerator(NeedleGenerator):
    """Makes samples in which people live beside places; the question asks who has already visited a country.

    Raises:
        UserError: more people are requested than there are associations, unused names or depths in the text.
    """

    options: AssociationOptions

    def __init__(self, options: AssociationOptions, *, task: str, **setting: Any) -> None:
        super().__init__(options, task=task, **setting)
        self._shown, _ = associations(options.associations)
        most = min(len(self._shown), len(_PEOPLE) - 1, len(DEPTHS))
        if options.people > most:
            raise UserError(f"{task} can use at most {most} people with these associations; set fewer people.")
        if options.absent and options.people == len(self._shown):
            raise UserError(f"{task} leaves no association for absent needles: set fewer than {options.people} people.")

    def value_in_needle(self, value: str) -> str:
        """Returns a person's name with the words that follow it in the needle, a text that is nowhere else."""
        return needle(value, "")[:-1]

    def other_value(self, index: int, value: str, rng: random.Random) -> str:
        """Draws a person who is not in the sample."""
        return rng.choice([person for person in _PEOPLE if person not in self._drawn(index)[1]])

    def guess_nats(self) -> float:
        """Returns the NLL, in nats, of a random guess among the people of a sample."""
        return math.log(self.options.people)

    def asks_for_absent(self, index: int, draft: HaystackDraft, rng: random.Random) -> HaystackDraft:
        """Returns the sample with a question about a country in which nobody lives."""
        others = sorted(self._shown.keys() - self._drawn(index)[0])
        return dataclasses.replace(draft, references=[NONE], closing=self._question(rng.choice(others)))

    def says_absence(self, closing: str) -> str:
        """Returns the question with a sentence on the right answer if nobody is meant."""
        return f'{closing} If nobody has, the answer is "{NONE}".'

    def holds_value(self, answer: str) -> bool:
        """Whether an answer holds the name of a person, of the sample or not."""
        return any(re.search(rf"\b{person}\b", answer, re.IGNORECASE) for person in _PEOPLE)

    def needle_values(self, index: int) -> list[str]:
        """Returns the people of a sample, the one who is the answer first."""
        return self._drawn(index)[1]

    def _question(self, asked: str) -> str:
        return ("\n" if self._inline else "") + QUESTION.format(asked=asked)

    def _drawn(self, index: int) -> tuple[list[str], list[str]]:
        """Draws the places and the people of a sample.

        The question is about the first place; its answer is the first person, who lives there.
        """
        rng = seeded_random(*self._name, index, "needles")
        count = self.options.people
        return rng.sample(sorted(self._shown), count), rng.sample(_PEOPLE, count)

    def _make(self, index: int) -> HaystackDraft:
        places, people = self._drawn(index)
        needles = [needle(person, self._shown[place]) for person, place in zip(people, places, strict=True)]
        return HaystackDraft(
            references=people[:1],
            answer_prefix="Answer:",
            opening=["Read this text, which says where some people live.\n"],
            closing=self._question(places[0]),
            haystack=self._shared_haystack,
            inserts=self.placed(index, needles, {0}, 0),
            least_units=len(needles),
            counter=self.counter,
        )


class TurnsGenerator(NeedleGenerator):
    """Makes samples of requests with replies; several requests are equal, and the answer is the reply to the n-th."""

    options: TurnsOptions

    def value_in_needle(self, value: str) -> str:
        """Returns a reply with the word before it, as it is written in the text."""
        return f" Reply: {value}"

    def other_value(self, index: int, value: str, rng: random.Random) -> str:
        """Draws a new reply."""
        return _reply(rng)

    def guess_nats(self) -> float:
        """Returns the NLL, in nats, of a random guess among the replies to the same request."""
        return math.log(self.options.same_turns)

    def split_reference(self, reference: str) -> tuple[str, str]:
        """Splits a reference into the random code with which the answer has to begin, and the reply."""
        code, _, reply = reference.partition(" ")
        return f" {code}", reply

    def asks_for_absent(self, index: int, draft: HaystackDraft, rng: random.Random) -> HaystackDraft:
        """Returns the sample with a question about a request that is not in the text."""
        before, _, request = draft.closing.rpartition(_TO)
        other = request
        while other == request:
            other = f"{_request(rng, short_nouns()[1::2])}."
        code = draft.references[0].partition(" ")[0]
        return dataclasses.replace(draft, references=[f"{code} {NONE}"], closing=f"{before}{_TO}{other}")

    def says_absence(self, closing: str) -> str:
        """Returns the request with a sentence on the right reply if there is no such request."""
        code = closing.split()[2]
        return f'{closing} If there is no such request, write {code} and then "{NONE}".'

    def holds_value(self, answer: str) -> bool:
        """Whether an answer holds more than its first word, the code, and the word that says that there is no reply."""
        return len([word for word in answer.split()[1:] if not says_none(word)]) > 0

    def needle_values(self, index: int) -> list[str]:
        """Returns the replies to the request of the question, the right one first."""
        return self._drawn(index)[1]

    def _drawn(self, index: int) -> tuple[str, list[str], str]:
        """Draws the request of the question, the replies to it, and the code with which the answer begins."""
        rng = seeded_random(*self._name, index, "turns")
        request = _request(rng, short_nouns()[1::2])
        replies = distinct(self.options.same_turns, lambda: _reply(rng))
        return request, replies, "".join(rng.choices(string.ascii_letters + string.digits, k=_CODE_LETTERS))

    @functools.cached_property
    def _pool(self) -> tuple[list[str], NDArray[np.int64]]:
        """The turns (request and reply) of the haystack, and their token counts.

        Their requests use every second noun; the request that the question is about uses one of the other nouns.
        """
        rng = seeded_random(*self._name, "pool")
        nouns = short_nouns()[::2]
        lines = [_turn(_request(rng, nouns), _reply(rng)) + "\n" for _ in range(_POOL_TURNS)]
        return lines, self.counter.count_pool(lines)

    def _make(self, index: int) -> HaystackDraft:
        count = self.options.same_turns
        request, replies, code = self._drawn(index)
        inserts = self.placed(index, [_turn(request, reply) for reply in replies], {0}, 0)
        place = 1 + next(number for number, insert in enumerate(inserts) if insert.is_queried)
        lines, tokens = self._pool
        order = seeded_order(len(lines), *self._name, index, "haystack")
        return HaystackDraft(
            references=[f"{code} {replies[0]}"],
            answer_prefix="Reply:",
            opening=["These are requests, each with its reply.\n"],
            closing=f"Request: write {code} and then, word for word, reply {place} of the {count}{_TO}{request}.",
            haystack=LineHaystack(pool=lines, order=order, cumulative_tokens=running_totals(tokens[order])),
            inserts=inserts,
            least_units=count,
            most_units=len(lines),
            counter=self.counter,
        )


def _request(rng: random.Random, nouns: Sequence[str]) -> str:
    return f"write a {rng.choice(_FORMS)} about the word {rng.choice(nouns)}"


def _reply(rng: random.Random) -> str:
    return " ".join(rng.choices(short_nouns(), k=_REPLY_WORDS)) + "."


def _turn(request: str, reply: str) -> str:
    return f"Request: {request}. Reply: {reply}"


class AssociationTask(NiahTask):
    """A needle without a word in common with its question; the generated answer must contain the person's name."""

    options_class = AssociationOptions
    generator_class = AssociationGenerator

    @classmethod
    def corpus_facts(cls, options: Any) -> tuple[str | None, str | None, str | None]:
        """Returns name, hash and source of the haystack; the source includes a hash of the user's associations."""
        name, digest, source = super().corpus_facts(options)
        if options.associations:
            associated = f"associations {associations(options.associations)[1][:16]}"
            source = f"{source}, {associated}" if source else associated
        return name, digest, source


class TurnsTask(NiahTask):
    """The reply to the n-th of several equal requests, generated and scored as in OpenAI-MRCR."""

    options_class = TurnsOptions
    generator_class = TurnsGenerator

    def score(self, answer: str, references: Sequence[str]) -> float:
        """Returns the similarity of answer and reply (`SequenceMatcher.ratio`), or 0 if the code is not first in it."""
        code, _, _ = references[0].partition(" ")
        if not answer.startswith(code):
            return 0.0
        without = [text.removeprefix(code) for text in (answer, references[0])]
        return difflib.SequenceMatcher(None, without[0], without[1]).ratio()


class ForcedAssociationTask(ForcedNiahTask, AssociationTask):
    """The prompts of `sb_association`; one forward pass scores the name, and a guess is one of the sample's people."""

    metrics: ClassVar = {**ForcedNiahTask.metrics, "chance": True}


class ForcedTurnsTask(ForcedNiahTask, TurnsTask):
    """The prompts of `sb_turns` with the code; one forward pass scores the reply, and a guess is one of the turns."""

    metrics: ClassVar = {**ForcedNiahTask.metrics, "chance": True}
