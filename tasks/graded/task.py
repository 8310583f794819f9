"""The task classes of graded tasks: prompts, scores and the record."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from sbeval.results.records import TaskRecord
from sbeval.tasks.graded.forms import Question
from sbeval.tasks.graded.needles import GradedNeedleGenerator
from sbeval.tasks.graded.options import (
    GradedNeedleOptions,
    GradedOptions,
    GradedQaOptions,
    GradedVariablesOptions,
    GradedWordsOptions,
)
from sbeval.tasks.graded.qa import GradedQaGenerator
from sbeval.tasks.graded.scores import chosen_letter, direct_answer, exact_match, soft_match, two_steps
from sbeval.tasks.graded.variables import GradedVariablesGenerator
from sbeval.tasks.graded.words import GradedWordsGenerator
from sbeval.tasks.ruler.drafts import Generator
from sbeval.tasks.ruler.families import QaTask
from sbeval.tasks.ruler.task import RulerTask, SizesByLength, averages

EXACT, SOFT, FIRST_STEP = "exact_match", "soft_match", "first_step"
AVERAGES = [*averages(EXACT), *averages(SOFT)]
CHOICE_AVERAGES = averages(EXACT)


class Asks(Protocol):
    """A generator whose samples have a question in the forms of graded tasks."""

    def question(self, index: int) -> Question:
        """Returns the question of a sample."""


class GradedTask(RulerTask):
    """A kind of graded task at one level and in one form; its samples are those of the other levels and forms.

    Metrics at each length: `exact_match` and, except for choices, `soft_match`. With two steps these score the line of
    the answer, and `first_step` is the soft match of the first step.

    Attributes:
        kind: the kind of task, which seeds its samples.
    """

    family = "graded"
    kind: ClassVar[str]
    options: GradedOptions

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of the samples, which all levels and forms of a kind share."""
        return super().make_generator(f"graded_{self.kind}")

    def run_metrics(self) -> Mapping[str, bool]:
        """Returns the metrics of each length in this run, mapped to whether higher is better."""
        metrics = {"direct": (EXACT, SOFT), "steps": (EXACT, SOFT, FIRST_STEP), "choice": (EXACT,)}
        return dict.fromkeys(metrics[self.options.form], True)

    def answer_scores(self, answer: str, doc: Mapping[str, Any]) -> dict[str, float]:
        """Returns the metrics of one cleaned answer of a sample."""
        references = doc["references"]
        if self.options.form == "choice":
            return {EXACT: float(chosen_letter(answer) in references)}
        if self.options.form == "direct":
            line = direct_answer(answer)
            return {EXACT: exact_match(line, references), SOFT: soft_match(line, references)}
        first, line = two_steps(answer)
        scores = {EXACT: exact_match(line, references), SOFT: soft_match(line, references)}
        return {**scores, FIRST_STEP: soft_match(first, [doc["evidence"]])}

    def record(self) -> TaskRecord:
        """Returns the facts about this run for the results file, with the level."""
        form = self.options.form
        protocol = f"graded_{self.kind}" + ("" if form == "direct" else f"_{form}")
        return dataclasses.replace(super().record(), protocol=protocol, level=self.options.level)

    def _row(self, index: int, sizes_by_length: SizesByLength) -> dict[str, Any]:
        generator: Asks = self.generator  # type: ignore[assignment]
        question = generator.question(index)
        row = {**super()._row(index, sizes_by_length), "level": self.options.level}
        return {**row, "evidence": question.evidence} if self.options.form == "steps" else row


class GradedNeedleTask(GradedTask):
    """Graded needles: the password of one thing, beside none, few or many others."""

    kind = "needle"
    options_class = GradedNeedleOptions
    generator_class = GradedNeedleGenerator


class GradedVariablesTask(GradedTask):
    """Graded variables: boxes that hold what other boxes hold."""

    kind = "variables"
    options_class = GradedVariablesOptions
    generator_class = GradedVariablesGenerator


class GradedWordsTask(GradedTask):
    """Graded words: the most frequent words of a list."""

    kind = "words"
    options_class = GradedWordsOptions
    generator_class = GradedWordsGenerator


class GradedQaTask(GradedTask):
    """Graded question answering on documents in the layout of SQuAD 2."""

    kind = "qa"
    options_class = GradedQaOptions
    generator_class = GradedQaGenerator

    corpus_facts = QaTask.corpus_facts
