"""What a run asks of the packaged tasks, checked before torch is imported and a model is loaded."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.settings import read_value
from sbeval.tasks.metadata import TaskOptions
from sbeval.tasks.packaged import PREFIX, named
from sbeval.tasks.perplexity.options import CorpusOptions, PerplexityOptions
from sbeval.tasks.recall import options as recall
from sbeval.tasks.ruler.corpora import read_options


def check_options(tasks: Iterable[str], metadata: Mapping[str, Any]) -> None:
    """Reads every option of the packaged tasks, and for other tasks those that all have in common.

    Args:
        tasks: names and patterns of tasks and groups, those of others among them.
        metadata: what the user gave, the model's arguments among it.

    Raises:
        UserError: naming the option, what it may be and what it is; or there is no text to read.
    """
    for place, options in [("", metadata), *metadata.items()]:
        if isinstance(options, Mapping) and (not place or place.startswith(PREFIX)):
            _check_shared(place, options)
    for name, definition in named(tasks):
        if definition is None or "class" not in definition:
            continue
        options = task_options(name, definition, metadata)
        if isinstance(options, CorpusOptions):
            try:
                options.check_text(str(definition.get("dataset_name")))
            except UserError as error:
                raise UserError(f"{name}: {error}") from error


def task_options(name: str, definition: Mapping[str, Any], metadata: Mapping[str, Any]) -> TaskOptions | None:
    """Returns the options of a packaged task as the task itself reads them, None where only its class knows them.

    Args:
        name: of the task.
        definition: what its YAML says.
        metadata: what the user gave.

    Raises:
        UserError: one cannot be.
    """
    own = definition.get("metadata") or {}
    if "ruler" in own:
        return read_options(name, own["ruler"], metadata)
    kind = options_class(definition["class"])
    if kind is None:
        return None
    return kind.of_task(name, {key: value for key, value in own.items() if key in kind.model_fields} | dict(metadata))


def options_class(task_class: str) -> type[TaskOptions] | None:
    """Returns the options of a task without RULER's, by the class that its YAML names; None for one unknown here."""
    module, _, name = task_class.rpartition(".")
    if module.startswith(f"{__package__}.perplexity."):
        return PerplexityOptions
    return getattr(recall, f"{name.removesuffix('Task')}Options", None)


def _check_shared(place: str, options: Mapping[str, Any]) -> None:
    shared = {key: options[key] for key in TaskOptions.model_fields if options.get(key) is not None}
    TaskOptions.read(shared, place=place, source="--metadata")
    if options.get("split") is not None:
        from sbeval.corpora.split import Split  # brings numpy along

        read_value(Split, options["split"], name="split", source="--metadata")
    text = options.get("data_path")
    if isinstance(text, str) and not Path(text).expanduser().exists():
        raise UserError(f"Expected text at data_path {text!r}, found nothing there: check the path.")
