"""Which corpus a task needs: essays for its haystack, or questions with their documents."""

from sbeval.tasks.ruler.choices import Choices
from sbeval.tasks.ruler.essays import Essays, load_essays
from sbeval.tasks.ruler.qa_corpora import QaCorpus, load_qa

PATH_KEYS = frozenset({"essays", "squad", "hotpot"})


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
