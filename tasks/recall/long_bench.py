"""LongBench v2: questions on long texts with four choices, which one forward pass scores by log-likelihood.

After Bai et al., *LongBench v2* (arXiv 2412.15204), with lm-eval's data and wording. As in the paper, the middle of a
text that is too long is removed, and every question is asked a second time without its text.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jinja2
import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.tasks.draws import seeded_order
from sbeval.tasks.recall.many_shot import LabelTask
from sbeval.tasks.recall.options import LongBenchOptions
from sbeval.tasks.recall.questions import LETTERS, Question, load_questions
from sbeval.tasks.ruler.drafts import Draft, Frame, Generator, prompt_text
from sbeval.tasks.ruler.task import SizesByLength
from sbeval.tasks.ruler.wording import long_bench_wording
from sbeval.tasks.tokens import TokenCounter

_CUE = "Answer:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutDraft(Draft):
    """A sample with a text whose middle may be removed; it is shortened or extended in units of one token.

    Attributes:
        starts: first character of each token, int64 [tokens].
        stops: the character after each token, int64 [tokens].
    """

    text: str
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    counter: TokenCounter

    def body(self, units: int) -> str:
        """Returns the text without its middle: the first half and the last half of `units` tokens."""
        if units >= len(self.starts):
            return self.text
        first, last = (units + 1) // 2, len(self.starts) - units // 2
        begin = self.text[: self.stops[first - 1]] if first else ""
        return begin + (self.text[self.starts[last] :] if last < len(self.starts) else "")

    def body_tokens(self, units: int) -> int:
        """Counts the tokens of the shortened text."""
        before, after = self.body_ends()
        around, whole = self.counter.encode([before + after, before + self.body(units) + after], special_tokens=False)
        return len(whole) - len(around)

    def units_within(self, tokens: int) -> int:
        """Returns how many tokens of the text can be kept so that the shortened text has at most `tokens` tokens.

        The text's beginning and end are joined and tokenised together, since tokens may change where they meet.
        """
        units = min(max(0, tokens), len(self.starts))
        while units > 0 and (over := self.body_tokens(units) - tokens) > 0:
            units = max(0, units - over)
        return units


class LongBenchGenerator(Generator):
    """Makes the samples of one stratum, the benchmark's category of text length, in an order that the seed decides.

    The strata are "short", "medium" and "long".
    """

    options: LongBenchOptions
    labels = LETTERS

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
        _, starts, stops = self.counter.encode_with_offsets(entry.text)
        inside = stops > starts
        return CutDraft(
            references=[entry.right],
            answer_prefix=_CUE,
            opening=[opening],
            closing=closing.removesuffix(_CUE),
            least_units=0,
            most_units=int(inside.sum()),
            text=entry.text,
            starts=starts[inside],
            stops=stops[inside],
            counter=self.counter,
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
