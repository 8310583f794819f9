"""The task classes of RULER, with their options and generators; answers are generated or teacher-forced.

A teacher-forced task does not let the model generate: one forward pass scores the right answer, of which there is one.
Its prompts are those of the generating task (whose name lacks `_forced`), sample by sample, and are filled by the same
rule, also with the option `scripts: nvidia`. Each answer is scored twice: after the prompt, and after the prompt in
which another value replaces the needle's value. The difference of both NLLs (`retrieval_gain`) shows what the model
took from the needle.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from lm_eval.api.instance import Instance

from sbeval.corpora.tokenizers import shared_start
from sbeval.errors import UserError
from sbeval.results.records import metric_key
from sbeval.scoring.requests import TargetSequence
from sbeval.tasks.base import Numbered
from sbeval.tasks.draws import seeded_random
from sbeval.tasks.recall.task import split_answers
from sbeval.tasks.ruler.absent import FORCED, GENERATED, NONE, Choice, generated_scores
from sbeval.tasks.ruler.drafts import Frame, Generator
from sbeval.tasks.ruler.niah import NeedleGenerator, NiahGenerator, VtGenerator
from sbeval.tasks.ruler.options import (
    CweOptions,
    FweOptions,
    NiahOptions,
    PlacedOptions,
    QaOptions,
    RulerOptions,
    VtOptions,
)
from sbeval.tasks.ruler.qa import QaGenerator, task_questions
from sbeval.tasks.ruler.task import RulerTask, SizesByLength, string_match_part
from sbeval.tasks.ruler.words import CweGenerator, FweGenerator
from sbeval.tasks.tokens import TAIL_CHARACTERS, TokenCounter


class NiahTask(RulerTask):
    """Needles in a haystack.

    With the option `absent`, the key of some samples is not in the text. The metrics are then `found` (the score of the
    samples whose key is there), and `said_absent` and `invented` of those whose key is not (`tasks/ruler/absent.py`).
    """

    options_class: ClassVar[type[RulerOptions]] = NiahOptions
    generator_class: ClassVar[type[Generator]] = NiahGenerator
    options: PlacedOptions
    generator: NeedleGenerator

    def run_metrics(self) -> Mapping[str, bool]:
        """Returns the metrics of each length in this run, mapped to whether higher is better."""
        return GENERATED if self.options.absent else self.metrics

    def answer_scores(self, answer: str, doc: Mapping[str, Any]) -> dict[str, float]:
        """Returns the metrics of one cleaned answer of a sample."""
        if not self.options.absent:
            return super().answer_scores(answer, doc)
        is_absent = bool(doc["absent"])
        score = math.nan if is_absent else self.score(answer, doc["references"])
        holds_value = self.generator.holds_value(answer)
        return generated_scores(answer, score, absent=is_absent, holds_value=holds_value)

    def sample_facts(self, scored: Mapping[int, Sequence[Sequence[int]]]) -> dict[str, Any]:
        """Returns the share of absent needles, and how many samples have one at each length.

        Raises:
            UserError: one of several ranks has no sample with, or none without its key in the text.
        """
        if not self.options.absent:
            return {}
        absent = {
            length: [sum(map(self.generator.is_absent, indices)) for indices in by_rank]
            for length, by_rank in scored.items()
        }
        for length, by_rank in scored.items():
            ranks = zip(absent[length], map(len, by_rank), strict=True)
            if len(by_rank) > 1 and any(count in (0, samples) for count, samples in ranks):
                raise UserError(
                    f"{self.config.task}: some rank has no sample with an absent needle, or only such samples: use "
                    "fewer processes or a larger --limit."
                )
        return {
            "absent": self.options.absent,
            "absent_samples": {str(length): sum(by_rank) for length, by_rank in absent.items()},
            "fitting_samples": {str(length): sum(map(len, by_rank)) for length, by_rank in scored.items()},
        }

    def _row(self, index: int, sizes_by_length: SizesByLength) -> dict[str, Any]:
        row = super()._row(index, sizes_by_length)
        return {**row, "absent": self.generator.is_absent(index)} if self.options.absent else row


class VtTask(RulerTask):
    """Variable tracking."""

    options_class = VtOptions
    generator_class = VtGenerator


class CweTask(RulerTask):
    """Common-words extraction."""

    options_class = CweOptions
    generator_class = CweGenerator


class FweTask(RulerTask):
    """Frequent-words extraction."""

    options_class = FweOptions
    generator_class = FweGenerator


class QaTask(RulerTask):
    """Question answering; an answer is right if it contains any alias of the reference."""

    options_class = QaOptions
    generator_class = QaGenerator

    @classmethod
    def corpus_facts(cls, options: Any) -> tuple[str | None, str | None, str | None]:
        """Loads the questions, and returns the data set's name, hash and source."""
        questions = task_questions(options)
        return options.dataset, questions.sha256, questions.source

    def score(self, answer: str, references: Sequence[str]) -> float:
        """Returns 1 if the answer contains at least one alias of the reference, else 0."""
        return string_match_part(answer, references)


class ForcedNiahTask(NiahTask):
    """A needle task with one answer, which is teacher-forced instead of generated.

    Metrics at each length: `answer_nll`, the answer's NLL in nats; `retrieval_gain`, by how much that NLL is higher if
    the needle holds another value; `exact_match`, whether every token of the answer is the model's most probable one;
    `chance_nll`, the NLL of a random guess among all values. A match of every token is stricter than RULER's score,
    which accepts the answer anywhere in a generated text.

    With the option `absent`, the model chooses among `NONE` and values in the text, by the log-probability of each. The
    metrics are then `found`, `said_absent` and `invented`, and the log-probability of `NONE` minus that of the best
    value, in nats: `none_margin_there` and `none_margin_absent`.
    """

    fixed: ClassVar = {"output_type": "loglikelihood_rolling"}
    family = "recall"
    metrics: ClassVar = {"answer_nll": False, "retrieval_gain": True, "exact_match": True, "chance_nll": False}

    def make_generator(self, name: str) -> NeedleGenerator:
        """Returns the generator of the generating task of the same name, so that both have the same samples.

        Raises:
            UserError: the options ask for several answers.
        """
        generator = super().make_generator(name.removesuffix("_forced"))
        assert isinstance(generator, NeedleGenerator)
        if not generator.has_single_answer:
            raise UserError(f"{name} can score only one answer; set num_needle_q and num_needle_v to 1.")
        return generator

    def make_requests(self, documents: Numbered, sizes: SizesByLength, frame: Frame) -> list[Instance]:
        """Makes two requests for each length: with the needle's value, and with another value in the needle."""
        if self.options.absent:
            return self._choice_requests(documents, sizes, frame)
        generator = self.generator
        sequences: list[TargetSequence] = []
        for _, doc in documents:
            answer_start, value = generator.split_reference(doc["references"][0])
            rng = seeded_random(self.config.task, self.options.seed, doc["index"], "another value")
            other = generator.other_value(doc["index"], value, rng)
            needle = generator.value_in_needle(value)
            for prompt in self.prompts(doc["index"], sizes, frame):
                if prompt.count(needle) != 1:
                    raise UserError(f"Expected the value {value} once in the prompt, found {prompt.count(needle)}.")
                replaced = prompt.replace(needle, generator.value_in_needle(other))
                sequences += [
                    answer_sequence(self.counter, text + answer_start, f" {value}") for text in (prompt, replaced)
                ]
        return self.target_requests(documents, sequences, counts=[2 * len(doc["lengths"]) for _, doc in documents])

    def _choice_requests(self, documents: Numbered, sizes: SizesByLength, frame: Frame) -> list[Instance]:
        """Makes a request for each length and each answer among which the model chooses: `NONE`, and values."""
        sequences: list[TargetSequence] = []
        counts = []
        for _, doc in documents:
            before = len(sequences)
            answer_start, _ = self.generator.split_reference(doc["references"][0])
            answers = [NONE, *self.generator.candidates(doc["index"], doc["lengths"][0])]
            for prompt in self.prompts(doc["index"], sizes, frame):
                sequences += [answer_sequence(self.counter, prompt + answer_start, f" {answer}") for answer in answers]
            counts.append(len(sequences) - before)
        return self.target_requests(documents, sequences, counts=counts)

    def _choice_scores(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
        scores: dict[str, float] = {}
        answers = len(results) // len(doc["lengths"])
        for place, length in enumerate(doc["lengths"]):
            logprobs = []
            for answer in results[place * answers : (place + 1) * answers]:
                ((nll,), _) = split_answers(answer, np.array([len(answer.logprobs)]), null=self.records_null)
                logprobs.append(-float(nll))
            choice = Choice(logprobs[0], logprobs[1:])
            scores |= {metric_key(name, length): n for name, n in choice.scores(absent=bool(doc["absent"])).items()}
        return scores

    def run_metrics(self) -> Mapping[str, bool]:
        """Returns the metrics of each length in this run, mapped to whether higher is better."""
        return FORCED if self.options.absent else self.metrics

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, float]:
        """Returns the metrics of one sample at every length."""
        if self.options.absent:
            return self._choice_scores(doc, results)
        chance = self.generator.guess_nats()
        scores: dict[str, float] = {}
        for length, *answers in zip(doc["lengths"], results[0::2], results[1::2], strict=True):
            ((nll,), (exact,)), ((replaced_nll,), _) = (
                split_answers(answer, np.array([len(answer.logprobs)]), null=self.records_null) for answer in answers
            )
            values = {
                "answer_nll": float(nll),
                "retrieval_gain": float(replaced_nll - nll),
                "exact_match": float(exact),
                "chance_nll": chance,
                "chance": math.exp(-chance),
            }
            scores |= {metric_key(metric, length): values[metric] for metric in self.metrics}
        return scores


def answer_sequence(counter: TokenCounter, prompt: str, answer: str) -> TargetSequence:
    """Returns the tokens of prompt and answer as one sequence whose targets are the answer's tokens.

    Both are tokenised together. The answer's tokens are those after the longest common prefix with the tokens of the
    prompt by itself.
    """
    (tokens,) = counter.encode([prompt + answer], special_tokens=True)
    tail = prompt[-TAIL_CHARACTERS:]
    alone, together = counter.encode([tail, tail + answer], special_tokens=False)
    answer_tokens = len(together) - shared_start([alone, together])
    assert 0 < answer_tokens < len(tokens)
    ids = np.array(tokens, dtype=np.int64)
    positions = np.arange(len(ids) - answer_tokens, len(ids)) - 1
    return TargetSequence(ids[:-1], positions, ids[positions + 1])
