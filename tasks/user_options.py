"""Reads and checks the options of packaged tasks before torch is imported and a model is loaded.

Options come from a task's YAML file and from `--metadata`. The classes that read them here are those that tasks use.
"""

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sbeval.corpora.local import check_exists
from sbeval.corpora.split import Split
from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.settings import described, read_value, unknown_key
from sbeval.task_metadata import settings_source
from sbeval.tasks.metadata import TaskOptions
from sbeval.tasks.packaged import PREFIX, expand_names
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
    "sbeval.tasks.recall.tallies.TallyTask",
    "sbeval.tasks.ruler.families.VtTask",
    "sbeval.tasks.ruler.families.CweTask",
    "sbeval.tasks.ruler.families.FweTask",
    "sbeval.tasks.ruler.families.QaTask",
    "sbeval.tasks.graded.task.GradedNeedleTask",
    "sbeval.tasks.graded.task.GradedVariablesTask",
    "sbeval.tasks.graded.task.GradedWordsTask",
    "sbeval.tasks.graded.task.GradedQaTask",
    "sbeval.tasks.recall.mqrar.MqrarTextTask",
    "sbeval.tasks.recall.mqrar.MqrarTask",
    "sbeval.tasks.recall.mqrar.FlipFlopTask",
    "sbeval.tasks.recall.algorithmic.AlgorithmTask",
    "sbeval.tasks.recall.copying.PassageTask",
    "sbeval.tasks.recall.copying.SelectiveTask",
    "sbeval.tasks.recall.copying.PhraseTask",
    "sbeval.tasks.recall.many_shot.ManyShotTask",
    "sbeval.tasks.recall.long_bench.LongBenchTask",
    "sbeval.tasks.mrcr.task.MrcrTask",
)
"""Import paths of the task classes, in the order in which `--help` lists their options.

They are strings because importing a task class imports lm-eval.
"""


def task_class(path: str) -> "type[BaseTask]":
    """Imports a task class by its import path, such as "sbeval.tasks.recall.span.SpanTask"."""
    module, _, name = path.rpartition(".")
    imported_class: type[BaseTask] = getattr(importlib.import_module(module), name)
    return imported_class


def options_classes() -> list[type[TaskOptions]]:
    """Returns the option classes of all tasks in the order of `--help`, each base class before its subclasses."""
    ordered: dict[type[TaskOptions], None] = {}
    for path in TASK_CLASSES:
        mro = task_class(path).options_class.__mro__
        ordered |= dict.fromkeys(base for base in reversed(mro) if issubclass(base, TaskOptions))
    return list(ordered)


def metadata_keys() -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns the metadata keys of each option class for `--help`: its title, and pairs of key and description.

    A key that a base class already lists with the same description is left out.
    """
    titled = []
    for options_class in options_classes():
        parents = (parent for parent in options_class.__mro__[1:] if issubclass(parent, TaskOptions))
        inherited = {line for parent in parents for line in described(parent)}
        lines = [line for line in described(options_class, without=options_class.fixed) if line not in inherited]
        if lines and "title" in vars(options_class):
            titled.append((options_class.title, lines))
    return titled


def check_options(tasks: Iterable[str], metadata: Mapping[str, Any], model_args: Iterable[str] = ()) -> None:
    """Checks every option of the packaged tasks, and loads the corpora of RULER's tasks.

    Loaded corpora stay in memory, so the tasks do not read them again. `tasks` may also hold patterns or tasks of
    lm-eval. For these names only the options that all tasks share are checked.

    Args:
        tasks: names and patterns of tasks and groups.
        metadata: the metadata that lm-eval passes to tasks, which includes the model's arguments.
        model_args: names of the model's arguments; a misspelt one is reported as one of `--model_args`.

    Raises:
        UserError: an option has an impossible value, or a text cannot be read.
    """
    for place, options in [("", metadata), *metadata.items()]:
        if isinstance(options, Mapping) and (not place or place.startswith(PREFIX)):
            _check_shared(place, options)
    definitions = _packaged_only(expand_names(tasks))
    for name, definition in definitions.items():
        kind = task_class(definition["class"]).options_class
        kind.check_shared_keys(model_args, task=name, source="--model_args")
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
    """Checks that each metadata key is read by at least one packaged task.

    The check is skipped if `tasks` names a task that is not packaged, since such a task may read any key.

    Raises:
        UserError: no packaged task reads a key.
    """
    unprefixed = [key for key in keys if not key.startswith(PREFIX)]
    definitions = dict(expand_names(tasks))
    if not unprefixed or None in definitions.values():
        return
    # the run's tasks usually read every key, and importing the other tasks takes 0.2 seconds
    run_classes = {definition["class"] for definition in _packaged_only(definitions.items()).values()}
    read = {field for path in run_classes for field in task_class(path).options_class.model_fields}
    if read.issuperset(unprefixed):
        return
    known = {field for kind in options_classes() for field in kind.model_fields}
    for key in unprefixed:
        if key not in known:
            raise UserError(unknown_key(key, known, place="a packaged task", source=settings_source()))


def task_options(name: str, definition: Mapping[str, Any], metadata: Mapping[str, Any]) -> TaskOptions:
    """Returns the options of a packaged task as the task itself reads them.

    Raises:
        UserError: an option has an impossible value, or the options name no text.
    """
    options = task_class(definition["class"]).read_options(name, definition.get("metadata") or {}, metadata)
    if isinstance(options, CorpusOptions):
        try:
            options.check_text(str(definition.get("dataset_name")))
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    return options


def _packaged_only(definitions: Iterable[tuple[str, Mapping[str, Any] | None]]) -> dict[str, Mapping[str, Any]]:
    """Returns the definitions of packaged tasks by name; a task of lm-eval has None as its definition."""
    return {name: definition for name, definition in definitions if definition and "class" in definition}


def _check_shared(place: str, options: Mapping[str, Any]) -> None:
    shared = {key: options[key] for key in TaskOptions.model_fields if options.get(key) is not None}
    TaskOptions.read(shared, place=place, source=settings_source())
    if options.get("split") is not None:
        read_value(Split, options["split"], name="split", source=settings_source())
    text = options.get("data_path")
    if isinstance(text, str):
        check_exists(local_path(text))
