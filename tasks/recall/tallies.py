"""Tallies: some things of a text have a label; how many have a given one, which label is the most frequent?

The idea of aggregation over a whole text is that of OOLONG (Bertsch et al., arXiv 2511.02817); texts and wording were
written for this project, and no judge is needed. A sample has the same labelled things, the same questions and the same
answers at every context length; only the lines between them, on things without a label, become more.
"""

import dataclasses
import functools
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from lm_eval.api.instance import Instance
from numpy.typing import NDArray
from pydantic import Field

from sbeval.results.records import CHANCE_RELATIVE_ERROR, RELATIVE_ERROR, TaskRecord, metric_key
from sbeval.scoring.requests import TargetSequence
from sbeval.settings import MOST_COUNTED, whole
from sbeval.tasks.base import Numbered
from sbeval.tasks.draws import seeded_order, seeded_random, short_nouns, word_lists
from sbeval.tasks.recall.task import split_answers
from sbeval.tasks.ruler.drafts import Frame, Generator, HaystackDraft, Insert
from sbeval.tasks.ruler.families import answer_sequence
from sbeval.tasks.ruler.haystacks import LineHaystack, running_totals
from sbeval.tasks.ruler.options import RulerOptions
from sbeval.tasks.ruler.task import RulerTask, SizesByLength

LABELS = ("red", "blue", "green", "white", "black", "brown", "pink", "gray")
NAME = "sb_tally"
CHOICES = 4
"""Counts among which a forced choice is made."""
_END = "."
"""Ends each answer of a forced choice: with tokens of single digits the answer 1 begins the answer 12."""
_POOL_LINES = 65536
_NUMBER = re.compile(r"\d+(?:,\d{3})*")
_LABEL = re.compile(rf"\b({'|'.join(LABELS)})\b", re.IGNORECASE)
Question = Literal["count", "most", "compare"]


class TallyOptions(RulerOptions):
    """Options of tallies."""

    title = "tallies of labels: sb_tally"
    fixed = frozenset({"question"})

    question: Question = Field(description="What is asked for: a count, the most frequent label, or the larger count.")
    items: Annotated[int, whole(2 * CHOICES + 1, most=MOST_COUNTED)] = Field(description="Things that have a label.")
    labels: Annotated[int, whole(2, most=len(LABELS))] = Field(description="Number of different labels.")

    @property
    def most_asked(self) -> int:
        """The largest count that is asked for, less than half of the things."""
        return (self.items - 1) // 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """The labels of one sample.

    Attributes:
        counts: number of things with each label; one label has more than any other one.
        asked: the label whose count is asked for; the count is a uniform draw from 1 to `TallyOptions.most_asked`.
        pair: the two labels that are compared, in the order of the question; one is `asked`, and their counts differ.
    """

    counts: Mapping[str, int]
    asked: str
    pair: tuple[str, str]

    @property
    def most_frequent(self) -> str:
        """The label with the largest count."""
        return max(self.counts, key=lambda label: self.counts[label])

    @property
    def larger(self) -> str:
        """The label of the pair with the larger count."""
        return max(self.pair, key=lambda label: self.counts[label])


class TallyGenerator(Generator):
    """Makes the samples of tallies; the three questions have the same texts."""

    options: TallyOptions

    def __init__(self, options: TallyOptions, **setting: Any) -> None:
        super().__init__(options, **setting)
        self._drafts: dict[int, HaystackDraft] = {}

    def draft(self, index: int, context_length: int) -> HaystackDraft:
        """Makes sample `index`, which is the same at every length."""
        if index not in self._drafts:
            self._drafts[index] = self._make(index)
        return self._drafts[index]

    def tally(self, index: int) -> Tally:
        """Draws the labels of sample `index`."""
        rng = seeded_random(*self._name, index, "labels")
        labels = rng.sample(LABELS, self.options.labels)
        asked, other = labels[:2]
        count = rng.randint(1, self.options.most_asked)
        while True:
            cuts = sorted(rng.randint(0, self.options.items - count) for _ in labels[2:])
            ends = [0, *cuts, self.options.items - count]
            counts = [count, *np.diff(ends).tolist()]
            if counts.count(max(counts)) == 1 and counts[1] != count:
                break
        pair = (asked, other) if rng.random() < 0.5 else (other, asked)
        return Tally(counts=dict(zip(labels, counts, strict=True)), asked=asked, pair=pair)

    def candidates(self, index: int) -> list[str]:
        """Returns the answers among which a forced choice is made, in an order that does not depend on the right one.

        For a count these are the right one and three others, drawn uniformly: without the text, each of the four is
        right with the same probability.
        """
        tally = self.tally(index)
        if self.options.question == "most":
            return sorted(tally.counts)
        if self.options.question == "compare":
            return sorted(tally.pair)
        right = tally.counts[tally.asked]
        others = [count for count in range(1, self.options.most_asked + 1) if count != right]
        rng = seeded_random(*self._name, index, "other counts")
        return [str(count) for count in sorted([right, *rng.sample(others, CHOICES - 1)])]

    @functools.cached_property
    def _pool(self) -> tuple[list[str], NDArray[np.int64]]:
        """The lines on things without a label, and their token counts."""
        rng = seeded_random(*self._name, "pool")
        lines = [f"{_thing(rng)} has no label.\n" for _ in range(_POOL_LINES)]
        return lines, self.counter.count_pool(lines)

    def _make(self, index: int) -> HaystackDraft:
        tally = self.tally(index)
        rng = seeded_random(*self._name, index, "things")
        labels = [label for label, count in tally.counts.items() for _ in range(count)]
        rng.shuffle(labels)
        depths = sorted(rng.random() for _ in labels)
        things = [f"{_thing(rng)} has the label {label}.\n" for label in labels]
        lines, tokens = self._pool
        order = seeded_order(len(lines), *self._name, index, "haystack")
        named = sorted(tally.counts)
        question, answer = _asked(self.options.question, tally)
        return HaystackDraft(
            references=[answer],
            answer_prefix="Answer:",
            opening=[f"Some things in this text have a label, which is {_listed(named)}; the others have none.\n"],
            closing=question,
            haystack=LineHaystack(pool=lines, order=order, cumulative_tokens=running_totals(tokens[order])),
            inserts=[
                Insert(text=thing, fraction=depth, is_queried=False)
                for thing, depth in zip(things, depths, strict=True)
            ],
            least_units=1,
            most_units=len(lines),
            counter=self.counter,
        )


def _thing(rng: random.Random) -> str:
    nouns, adjectives = _words()
    return f"The {rng.choice(adjectives)} {rng.choice(nouns)} near the {rng.choice(nouns)}"


@functools.cache
def _words() -> tuple[list[str], list[str]]:
    """Returns nouns and adjectives without the labels."""
    nouns, adjectives = ([word for word in words if word not in LABELS] for words in (short_nouns(), word_lists()[1]))
    return nouns, adjectives


def _asked(question: Question, tally: Tally) -> tuple[str, str]:
    """Returns a question and its answer."""
    if question == "count":
        text = f"How many things in the text have the label {tally.asked}? Answer with a number."
        return text, str(tally.counts[tally.asked])
    if question == "most":
        named = _listed(sorted(tally.counts))
        return f"Which label do most things in the text have, {named}? Answer with one label.", tally.most_frequent
    first, second = tally.pair
    text = f"Which label do more things in the text have, {first} or {second}? Answer with one label."
    return text, tally.larger


def _listed(labels: Sequence[str]) -> str:
    return f"{', '.join(labels[:-1])} or {labels[-1]}"


def count_in(answer: str) -> int | None:
    """Returns the first number in an answer, written in digits; None if there is none."""
    match = _NUMBER.search(answer)
    return int(match[0].replace(",", "")) if match else None


def label_in(answer: str) -> str | None:
    """Returns the first label that an answer names; None if there is none."""
    match = _LABEL.search(answer)
    return match[0].lower() if match else None


def relative_error(count: int | None, right: int) -> float:
    """Returns the distance of a count from the right one, as a share of the right one and at most 1; 1 for no count."""
    return 1.0 if count is None else min(1.0, abs(count - right) / right)


def best_guess(counts: Sequence[int]) -> int:
    """Returns the count with the smallest mean relative error if each of `counts` is right equally often."""
    return min(counts, key=lambda guess: sum(relative_error(guess, right) for right in counts))


class TallyTask(RulerTask):
    """Tallies of labels, generated: a count, the most frequent label, or the more frequent of two.

    Metrics at each length: `score`, whether the first number or label in the answer is right; `chance`, that of a
    random guess, among all counts that are asked for or among the labels of the question. Counts also have
    `relative_error`, the distance from the right count as a share of it, at most 1, and `chance_relative_error`, that
    of `best_guess`: without the text no answer has a smaller one on average.
    """

    options_class = TallyOptions
    generator_class = TallyGenerator
    family = "tally"
    options: TallyOptions
    generator: TallyGenerator

    def record(self) -> TaskRecord:
        """Returns the facts about this run for the results file, with the question as the protocol."""
        forced = "" if self.OUTPUT_TYPE == "generate_until" else "_forced"
        return dataclasses.replace(super().record(), protocol=f"tally_{self.options.question}{forced}")

    def make_generator(self, name: str) -> Generator:
        """Returns the generator that all tallies share, so that their samples have the same texts."""
        return super().make_generator(NAME)

    def run_metrics(self) -> Mapping[str, bool]:
        """Returns the metrics of each length in this run, mapped to whether higher is better."""
        errors = {RELATIVE_ERROR: False, CHANCE_RELATIVE_ERROR: False} if self.options.question == "count" else {}
        return {"score": True, "chance": True, **errors}

    def answer_scores(self, answer: str, doc: Mapping[str, Any]) -> dict[str, float]:
        """Returns the metrics of one cleaned answer of a sample."""
        return self._scores(answer, doc, self._guesses(doc))

    def _guesses(self, doc: Mapping[str, Any]) -> list[str]:
        """Returns the answers that a random guess is among."""
        if self.options.question == "count":
            return [str(count) for count in range(1, self.options.most_asked + 1)]
        return self.generator.candidates(doc["index"])

    def _scores(self, answer: str, doc: Mapping[str, Any], guesses: Sequence[str]) -> dict[str, float]:
        (right,) = doc["references"]
        if self.options.question != "count":
            return {"score": float(label_in(answer) == right), "chance": 1 / len(guesses)}
        count = count_in(answer)
        return {
            "score": float(count == int(right)),
            "chance": 1 / len(guesses),
            RELATIVE_ERROR: relative_error(count, int(right)),
            CHANCE_RELATIVE_ERROR: relative_error(best_guess([int(guess) for guess in guesses]), int(right)),
        }


class ForcedTallyTask(TallyTask):
    """The prompts of the generated tally; the answer is the most probable of the labels, or of four counts.

    The log-probability of an answer includes the full stop after it.
    """

    fixed: ClassVar = {"output_type": "loglikelihood_rolling"}

    def make_requests(self, documents: Numbered, sizes: SizesByLength, frame: Frame) -> list[Instance]:
        """Makes a request for each length and each answer among which the model chooses."""
        sequences: list[TargetSequence] = []
        counts = []
        for _, doc in documents:
            before = len(sequences)
            for prompt in self.prompts(doc["index"], sizes, frame):
                sequences += [
                    answer_sequence(self.counter, prompt, f" {answer}{_END}") for answer in self._guesses(doc)
                ]
            counts.append(len(sequences) - before)
        return self.target_requests(documents, sequences, counts=counts)

    def _guesses(self, doc: Mapping[str, Any]) -> list[str]:
        return self.generator.candidates(doc["index"])

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
        """Returns the metrics of one sample at every length."""
        scores: dict[str, float] = {}
        guesses = self._guesses(doc)
        for place, length in enumerate(doc["lengths"]):
            logprobs = []
            for answer in results[place * len(guesses) : (place + 1) * len(guesses)]:
                ((nll,), _) = split_answers(answer, np.array([len(answer.logprobs)]), null=self.records_null)
                logprobs.append(-float(nll))
            of_answer = self._scores(guesses[int(np.argmax(logprobs))], doc, guesses)
            is_missing = any(map(math.isnan, logprobs))
            scores |= {metric_key(name, length): math.nan if is_missing else n for name, n in of_answer.items()}
        return scores
