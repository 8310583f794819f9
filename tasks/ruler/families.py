"""The task classes: which generator makes the samples, and how answers are scored."""

from collections.abc import Sequence

from sbeval.tasks.ruler.corpora import task_questions
from sbeval.tasks.ruler.cwe import CweGenerator
from sbeval.tasks.ruler.drafts import Generator
from sbeval.tasks.ruler.fit import Steps
from sbeval.tasks.ruler.fwe import FweGenerator
from sbeval.tasks.ruler.niah import NiahGenerator
from sbeval.tasks.ruler.options import CweOptions, FweOptions, NiahOptions, QaOptions, VtOptions
from sbeval.tasks.ruler.qa import QaGenerator
from sbeval.tasks.ruler.task import RulerTask, string_match_part
from sbeval.tasks.ruler.texts import QaCorpus
from sbeval.tasks.ruler.vt import VtGenerator

SHORT_TOKENS = 4096
"""Below this length NVIDIA's scripts take smaller steps where the haystack is lines."""


class NiahTask(RulerTask):
    """Needles in a haystack."""

    options: NiahOptions

    def steps(self, length: int) -> Steps | None:
        """Returns 500 words of essays, or 25 lines (5 at short lengths)."""
        return Steps(500 if self.options.type_haystack == "essay" else 25 if length >= SHORT_TOKENS else 5)

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of needles and haystack."""
        return NiahGenerator(self.options, task=name, counter=self.counter)


class VtTask(RulerTask):
    """Variable tracking."""

    options: VtOptions

    def steps(self, length: int) -> Steps:
        """Returns 500 words of essays, or 10 lines (5 at short lengths)."""
        return Steps(500 if self.options.type_haystack == "essay" else 10 if length >= SHORT_TOKENS else 5)

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of chains and haystack."""
        return VtGenerator(self.options, task=name, counter=self.counter)


class CweTask(RulerTask):
    """Common-words extraction."""

    options: CweOptions

    def steps(self, length: int) -> Steps:
        """Returns ten words."""
        return Steps(10)

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of word lists."""
        return CweGenerator(self.options, task=name, generated_tokens=self.generated_tokens, counter=self.counter)


class FweTask(RulerTask):
    """Frequent-words extraction."""

    options: FweOptions

    def steps(self, length: int) -> Steps:
        """Returns steps of a 32nd of the budget, from the budget over the letters of a word on; both count words."""
        budget = length - self.generated_tokens
        return Steps(max(1, budget // 32), origin=budget // self.options.coded_wordlen)

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of coded texts."""
        return FweGenerator(self.options, task=name, generated_tokens=self.generated_tokens, counter=self.counter)


class QaTask(RulerTask):
    """Question answering; any of the answer's aliases counts."""

    options: QaOptions

    def steps(self, length: int) -> Steps:
        """Returns ten documents."""
        return Steps(10)

    def _corpus(self) -> QaCorpus:
        corpus = task_questions(self.options)
        assert corpus is not None
        return corpus

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of questions with their documents."""
        return QaGenerator(self.options, self._corpus(), task=name, counter=self.counter)

    def available_samples(self) -> int:
        """Returns the number of questions."""
        return len(self._corpus().questions)

    def score(self, answer: str, references: Sequence[str]) -> float:
        """Scores 1 where an alias is found in the answer."""
        return string_match_part(answer, references)
