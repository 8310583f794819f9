"""Reads the options of packaged tasks from YAML and metadata before torch is imported and a model loaded."""

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sbeval.corpora.split import Split
from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.settings import described, read_value, unknown_key
from sbeval.tasks.metadata import TaskOptions
from sbeval.tasks.packaged import PREFIX, named
from sbeval.tasks.perplexity.options import CorpusOptions
from sbeval.tasks.ruler.texts import Missing, MissingCorpus

if TYPE_CHECKING:
    from sbeval.tasks.base import BaseTask

TASK_CLASSES = (
    "sbeval.tasks.perplexity.task.PerplexityTask",
    "sbeval.tasks.recall.span.SpanTask",
    "sbeval.tasks.ruler.families.NiahTask",
    "sbeval.tasks.recall.retrieval.AssociationTask",
    "sbeval.tasks.recall.retrieval.TurnsTask",
    "sbeval.tasks.ruler.families.VtTask",
    "sbeval.tasks.ruler.families.CweTask",
    "sbeval.tasks.ruler.families.FweTask",
    "sbeval.tasks.ruler.families.QaTask",
    "sbeval.tasks.recall.mqrar.MqrarTextTask",
    "sbeval.tasks.recall.mqrar.MqrarTask",
    "sbeval.tasks.recall.mqrar.FlipFlopTask",
    "sbeval.tasks.recall.copying.PassageTask",
    "sbeval.tasks.recall.copying.SelectiveTask",
    "sbeval.tasks.recall.copying.PhraseTask",
    "sbeval.tasks.recall.many_shot.ManyShotTask",
    "sbeval.tasks.recall.long_bench.LongBenchTask",
)
"""Task classes in the order in which the help lists their options; named, since importing them imports lm-eval."""


def task_class(path: str) -> "type[BaseTask]":
    """Imports a task's class, which carries its options, by the path that its YAML names."""
    module, _, name = path.rpartition(".")
    found: type[BaseTask] = getattr(importlib.import_module(module), name)
    return found


def options_classes() -> list[type[TaskOptions]]:
    """Returns the options of all tasks in the order of the help, shared ones before those that add to them."""
    kinds: dict[type[TaskOptions], None] = {}
    for path in TASK_CLASSES:
        mro = task_class(path).options_class.__mro__
        kinds |= dict.fromkeys(kind for kind in reversed(mro) if issubclass(kind, TaskOptions))
    return list(kinds)


def metadata_keys() -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns, for each kind of task, the keys that no kind above it shares with the same meaning."""
    titled = []
    for kind in options_classes():
        parents = (parent for parent in kind.__mro__[1:] if issubclass(parent, TaskOptions))
        above = {line for parent in parents for line in described(parent)}
        lines = [line for line in described(kind, without=kind.fixed) if line not in above]
        if lines and "title" in vars(kind):
            titled.append((kind.title, lines))
    return titled


def check_options(tasks: Iterable[str], metadata: Mapping[str, Any]) -> None:
    """Reads every option of the packaged tasks, and the corpora of RULER's, which stay in memory for them.

    Of other tasks, whose names and patterns may be among those given, the options are read that all have in common.

    Raises:
        UserError: naming the option, what it may be and what it is; or there is no text to read.
    """
    for place, options in [("", metadata), *metadata.items()]:
        if isinstance(options, Mapping) and (not place or place.startswith(PREFIX)):
            _check_shared(place, options)
    definitions = {name: definition for name, definition in named(tasks) if definition and "class" in definition}
    options_of = {name: task_options(name, definition, metadata) for name, definition in definitions.items()}
    missing: dict[Missing, list[str]] = {}
    for name, options in options_of.items():
        try:
            task_class(definitions[name]["class"]).corpus_facts(options)
        except MissingCorpus as error:
            for corpus in error.missing:
                missing.setdefault(corpus, []).append(name)
    if missing:
        raise MissingCorpus(list(missing), [name for names in missing.values() for name in names])


def check_keys(tasks: Iterable[str], keys: Iterable[str]) -> None:
    """Checks the metadata's keys where packaged tasks alone are asked for, since of others nobody knows what they read.

    Raises:
        UserError: no packaged task reads a key.
    """
    unprefixed = [key for key in keys if not key.startswith(PREFIX)]
    if not unprefixed or None in dict(named(tasks)).values():
        return
    known = {field for kind in options_classes() for field in kind.model_fields}
    for key in unprefixed:
        if key not in known:
            raise UserError(unknown_key(key, known, place="a packaged task", source="--metadata"))


def task_options(name: str, definition: Mapping[str, Any], metadata: Mapping[str, Any]) -> TaskOptions:
    """Returns the options of a packaged task as the task itself reads them.

    Raises:
        UserError: one cannot be, or they name no text.
    """
    options = task_class(definition["class"]).read_options(name, definition.get("metadata") or {}, metadata)
    if isinstance(options, CorpusOptions):
        try:
            options.check_text(str(definition.get("dataset_name")))
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    return options


def _check_shared(place: str, options: Mapping[str, Any]) -> None:
    shared = {key: options[key] for key in TaskOptions.model_fields if options.get(key) is not None}
    TaskOptions.read(shared, place=place, source="--metadata")
    if options.get("split") is not None:
        read_value(Split, options["split"], name="split", source="--metadata")
    text = options.get("data_path")
    if isinstance(text, str) and not local_path(text).exists():
        raise UserError.expected(f"text at data_path {text!r}", found="nothing there", remedy="check the path")
