"""Which corpus a task needs: essays for its haystack, or questions with their documents."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sbeval.tasks.ruler.choices import FIXED, Choices
from sbeval.tasks.ruler.essays import SENTENCE_RULE, Essays, load_essays
from sbeval.tasks.ruler.options import RUN_KEYS
from sbeval.tasks.ruler.qa_corpora import QaCorpus, load_qa

PATH_KEYS = frozenset({"essays", "squad", "hotpot"})


def option_keys(definition: Mapping[str, Any]) -> frozenset[str]:
    """Returns the options of a task with some definition; only needles are put at depths of one's choice."""
    shared = RUN_KEYS if "type_needle_k" in definition else RUN_KEYS - {"depths"}
    return shared | PATH_KEYS | (definition.keys() - FIXED)


class CorpusFacts(NamedTuple):
    """What the record says of a text source; all None where the text is generated."""

    name: str | None = None
    sha256: str | None = None
    detail: str | None = None


def task_essays(choices: Choices) -> Essays | None:
    """Returns the essays of a task whose haystack they are, None for another haystack.

    Raises:
        UserError: they cannot be loaded.
    """
    if choices.values.get("type_haystack") != "essay":
        return None
    return load_essays(choices.path("essays"))


def task_questions(choices: Choices) -> QaCorpus | None:
    """Returns the questions of a question-answering task, None for another task.

    Raises:
        UserError: they cannot be loaded.
    """
    if "dataset" not in choices.values:
        return None
    dataset = choices.one_of("dataset", ("squad", "hotpotqa"))
    if dataset == "squad":
        return load_qa("squad", choices.path("squad"))
    return load_qa("hotpotqa", choices.path("hotpot"))


def corpus_facts(choices: Choices) -> CorpusFacts:
    """Returns name, hash and source of the corpus a task needs.

    Raises:
        UserError: it cannot be loaded.
    """
    if (essays := task_essays(choices)) is not None:
        return CorpusFacts("essays", essays.sha256, f"{essays.source}, {SENTENCE_RULE}")
    if (questions := task_questions(choices)) is not None:
        return CorpusFacts(str(choices.values["dataset"]), questions.sha256, questions.source)
    return CorpusFacts()
