"""LongBench v2: questions on long texts with four choices, which one forward pass scores by log-likelihood.

After Bai et al., *LongBench v2* (arXiv 2412.15204), with lm-eval's data and wording. As in the paper, the middle of a
text that is too long is removed (`too_long` changes that), and every question is asked a second time without its text.
"""

import functools
from typing import Any, ClassVar

import jinja2

from sbeval.errors import UserError
from sbeval.tasks.draws import seeded_order
from sbeval.tasks.recall.many_shot import LabelTask
from sbeval.tasks.recall.options import LongBenchOptions
from sbeval.tasks.recall.questions import LETTERS, Question, load_questions
from sbeval.tasks.ruler.cut import CutDraft
from sbeval.tasks.ruler.drafts import Frame, Generator, prompt_text
from sbeval.tasks.ruler.task import SizesByLength
from sbeval.tasks.ruler.wording import long_bench_wording

_CUE = "Answer:"


class LongBenchGenerator(Generator):
    """Makes the samples of one stratum, the benchmark's category of text length, in an order that the seed decides.

    The strata are "short", "medium" and "long".
    """

    options: LongBenchOptions
    labels = LETTERS
    alike = False

    @functools.cached_property
    def _questions(self) -> list[Question]:
        known = [entry for entry in load_questions(self.options.longbench2)[0] if entry.stratum == self.options.stratum]
        return [known[i] for i in seeded_order(len(known), *self._name, "questions")]

    def available(self) -> int:
        """Returns the number of questions.

        Raises:
            UserError: the tokenizer gives no character offsets, or no question has a text of the requested stratum.
        """
        if not self.counter.tokenizer.is_fast:
            raise UserError("LongBench v2 needs a tokenizer that gives character offsets; use a fast tokenizer.")
        if not self._questions:
            raise UserError(f"This copy of LongBench v2 has no {self.options.stratum} texts: run another stratum.")
        return len(self._questions)

    def draft(self, index: int, context_length: int) -> CutDraft:
        """Makes sample `index`, which is the same at every length."""
        return self._draft(index)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - the cache and the generator live as long as the task
    def _draft(self, index: int) -> CutDraft:
        entry = self._questions[index]
        (opening, behind, *_) = long_bench_wording()
        closing = jinja2.Template(behind).render(question=entry.question, choices=entry.choices)
        return CutDraft.of_text(
            entry.text,
            self.counter,
            whole=self.options.too_long != "truncate",
            references=[entry.right],
            answer_prefix=_CUE,
            opening=[opening],
            closing=closing.removesuffix(_CUE),
        )


class LongBenchTask(LabelTask):
    """Questions of one stratum of LongBench v2, each with its text and without it."""

    options_class = LongBenchOptions
    generator_class = LongBenchGenerator
    metrics: ClassVar = {**LabelTask.metrics, "retrieval_gain": True}
    cue: ClassVar = _CUE

    @classmethod
    def corpus_facts(cls, options: Any) -> tuple[str | None, str | None, str | None]:
        """Loads the questions, and returns the data set's name, hash and source."""
        _, digest, source = load_questions(options.longbench2)
        return "longbench2", digest, source

    def prompts(self, index: int, sizes: SizesByLength, frame: Frame) -> list[str]:
        """Returns two prompts for every length: the question with its text, and the same question without its text."""
        without_text = prompt_text(self.generator.draft(index, self.lengths[0]), 0, frame)
        return [prompt for with_text in super().prompts(index, sizes, frame) for prompt in (with_text, without_text)]
