"""Which corpus a task needs, and a check before a model is loaded that it can be had."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sbeval.errors import UserError
from sbeval.tasks.packaged import named
from sbeval.tasks.recall.labelled import task_labelled
from sbeval.tasks.recall.options import ManyShotOptions
from sbeval.tasks.ruler.options import CweOptions, FweOptions, NiahOptions, QaOptions, RulerOptions, VtOptions
from sbeval.tasks.ruler.texts import SENTENCE_RULE, Essays, Missing, MissingCorpus, QaCorpus, load_essays, load_qa

OPTIONS: tuple[type[RulerOptions], ...] = (NiahOptions, VtOptions, CweOptions, FweOptions, QaOptions, ManyShotOptions)


def read_options(task: str, definition: Mapping[str, Any], metadata: Mapping[str, Any]) -> RulerOptions:
    """Returns the options of a task: those of its kind, which the keys of its definition tell.

    Args:
        task: its name.
        definition: what its YAML holds under `metadata.ruler`.
        metadata: what the user gave.

    Raises:
        UserError: no kind of task has such a definition, or an option cannot be.
    """
    kind = next((kind for kind in OPTIONS if definition.keys() <= kind.model_fields.keys()), None)
    if kind is None:
        raise UserError(
            f"Expected metadata.ruler of {task} to hold the options of one kind of task, found "
            f"{', '.join(definition)}: begin with the YAML of a packaged task."
        )
    return kind.of_task(task, metadata, definition)


class CorpusFacts(NamedTuple):
    """What the record says of a text source; all None where the text is generated."""

    name: str | None = None
    sha256: str | None = None
    detail: str | None = None


def task_essays(options: RulerOptions) -> Essays | None:
    """Returns the essays of a task whose haystack they are, None for another haystack.

    Raises:
        UserError: they cannot be loaded.
    """
    if isinstance(options, NiahOptions | VtOptions) and options.type_haystack == "essay":
        return load_essays(options.essays)
    return None


def task_questions(options: RulerOptions) -> QaCorpus | None:
    """Returns the questions of a question-answering task, None for another task.

    Raises:
        UserError: they cannot be loaded.
    """
    if not isinstance(options, QaOptions):
        return None
    return load_qa(options.dataset, options.squad if options.dataset == "squad" else options.hotpot)


def corpus_facts(options: RulerOptions) -> CorpusFacts:
    """Returns name, hash and source of the corpus a task needs.

    Raises:
        UserError: it cannot be loaded.
    """
    if (essays := task_essays(options)) is not None:
        return CorpusFacts("essays", essays.sha256, f"{essays.source}, {SENTENCE_RULE}")
    if isinstance(options, QaOptions) and (questions := task_questions(options)) is not None:
        return CorpusFacts(options.dataset, questions.sha256, questions.source)
    if isinstance(options, ManyShotOptions) and (labelled := task_labelled(options)) is not None:
        return CorpusFacts(options.examples, labelled.sha256, labelled.source)
    return CorpusFacts()


def check_corpora(tasks: Iterable[str], metadata: Mapping[str, Any]) -> None:
    """Reads the corpora that tasks need; they stay in memory for the tasks.

    Args:
        tasks: names and patterns of tasks and groups, others than RULER's among them.
        metadata: options of the tasks; `essays`, `squad` and `hotpot` name local copies.

    Raises:
        UserError: one cannot be had; the message names what to give, and which tasks need none.
    """
    missing: dict[Missing, list[str]] = {}
    for name, settings in named(tasks):
        if not (definition := ((settings or {}).get("metadata") or {}).get("ruler")):
            continue
        options = read_options(name, definition, metadata)
        try:
            task_essays(options)
            task_questions(options)
            task_labelled(options)
        except MissingCorpus as error:
            for one in error.missing:
                missing.setdefault(one, []).append(name)
    if missing:
        raise MissingCorpus(list(missing), [name for names in missing.values() for name in names])
