"""The task classes: which generator makes the samples, and how answers are scored."""

from collections.abc import Sequence

from sbeval.tasks.ruler.corpora import task_essays, task_questions
from sbeval.tasks.ruler.cwe import CweGenerator
from sbeval.tasks.ruler.essays import SENTENCE_RULE
from sbeval.tasks.ruler.fwe import FweGenerator
from sbeval.tasks.ruler.niah import NiahGenerator
from sbeval.tasks.ruler.qa import QaGenerator
from sbeval.tasks.ruler.qa_corpora import QaCorpus
from sbeval.tasks.ruler.scoring import string_match_part
from sbeval.tasks.ruler.task import CorpusFacts, Generator, RulerTask
from sbeval.tasks.ruler.vt import VtGenerator


class HaystackTask(RulerTask):
    """A task with a haystack, which may be essays."""

    def corpus(self) -> CorpusFacts:
        """Returns the essays' name and hash, and the rule that splits them."""
        essays = task_essays(self.choices)
        if essays is None:
            return CorpusFacts()
        return CorpusFacts("essays", essays.sha256, f"{essays.source}, {SENTENCE_RULE}")


class NiahTask(HaystackTask):
    """Needles in a haystack."""

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of needles and haystack."""
        return NiahGenerator(
            self.choices,
            task=name,
            seed=self.options.seed,
            depths_percent=self.options.depths_percent,
            counter=self.counter,
        )


class VtTask(HaystackTask):
    """Variable tracking."""

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of chains and haystack."""
        return VtGenerator(self.choices, task=name, seed=self.options.seed, counter=self.counter)


class CweTask(RulerTask):
    """Common-words extraction."""

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of word lists."""
        return CweGenerator(
            self.choices,
            task=name,
            seed=self.options.seed,
            generated_tokens=self.generated_tokens,
            counter=self.counter,
        )


class FweTask(RulerTask):
    """Frequent-words extraction."""

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of coded texts."""
        return FweGenerator(
            self.choices,
            task=name,
            seed=self.options.seed,
            generated_tokens=self.generated_tokens,
            counter=self.counter,
        )


class QaTask(RulerTask):
    """Question answering; any of the answer's aliases counts."""

    def _corpus(self) -> QaCorpus:
        corpus = task_questions(self.choices)
        assert corpus is not None
        return corpus

    def make_generator(self, name: str) -> Generator:
        """Returns the generator of questions with their documents."""
        return QaGenerator(self._corpus(), task=name, seed=self.options.seed, counter=self.counter)

    def available_samples(self) -> int:
        """Returns the number of questions."""
        return len(self._corpus().questions)

    def corpus(self) -> CorpusFacts:
        """Returns the corpus' name, hash and source."""
        corpus = self._corpus()
        return CorpusFacts(str(self.choices.values["dataset"]), corpus.sha256, corpus.source)

    def score(self, answer: str, references: Sequence[str]) -> float:
        """Scores 1 where an alias is found in the answer."""
        return string_match_part(answer, references)
