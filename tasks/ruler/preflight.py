"""What can be checked before a model is loaded: that the corpora some tasks need can be had."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lm_eval.tasks import TaskManager

from sbeval.tasks.ruler.choices import Choices
from sbeval.tasks.ruler.corpora import option_keys, task_essays, task_questions
from sbeval.tasks.ruler.missing import Missing, MissingCorpus
from sbeval.tasks.ruler.options import task_metadata

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
