"""Which corpus a task needs, and a check before a model is loaded that it can be had."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from lm_eval.tasks import TaskManager

from sbeval.tasks.ruler.options import FIXED, RUN_KEYS, Choices, task_metadata
from sbeval.tasks.ruler.texts import SENTENCE_RULE, Essays, Missing, MissingCorpus, QaCorpus, load_essays, load_qa

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


_TASKS = Path(__file__).parent.parent


def check_corpora(tasks: Iterable[str], metadata: Mapping[str, Any]) -> None:
    """Reads the corpora that tasks need; they stay in memory for the tasks.

    Args:
        tasks: names and patterns of tasks and groups, others than RULER's among them.
        metadata: options of the tasks; `essays`, `squad` and `hotpot` name local copies.

    Raises:
        UserError: one cannot be had; the message names what to give, and which tasks need none.
    """
    missing: dict[Missing, list[str]] = {}
    for name, definition in _definitions(tasks).items():
        choices = Choices(name, definition, task_metadata(metadata, name, option_keys(definition)))
        try:
            task_essays(choices)
            task_questions(choices)
        except MissingCorpus as error:
            for one in error.missing:
                missing.setdefault(one, []).append(name)
    if missing:
        raise MissingCorpus(list(missing), [name for names in missing.values() for name in names])


def _definitions(tasks: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Returns the definitions of RULER's tasks among the named tasks and groups, by name."""
    index = TaskManager(include_path=str(_TASKS), include_defaults=False).task_index
    found: dict[str, Mapping[str, Any]] = {}

    def add(member: str | Mapping[str, Any]) -> None:
        if not isinstance(member, str):  # a member with settings of its own
            name = str(member.get("task") if isinstance(member.get("task"), str) else member.get("group"))
            settings = member if isinstance(member.get("task"), list) else _settings(index, name)
        else:
            name, settings = member, _settings(index, member)
        if isinstance(members := settings.get("task"), list):
            for one in members:
                add(one)
        elif definition := (settings.get("metadata") or {}).get("ruler"):
            found[name] = definition

    for asked in tasks:
        for name in index:
            if fnmatchcase(name, asked):
                add(name)
    return found


def _settings(index: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns the YAML of a packaged task or group, nothing for others."""
    return index[name].cfg or {} if name in index else {}
