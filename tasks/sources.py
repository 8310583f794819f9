"""Where a task's settings come from: the `metadata:` of its YAML file, the run's metadata, and `SBEVAL_METADATA`.

lm-eval replaces the whole `metadata:` of an included file by that of the file that includes it. Here they are merged
key by key, so that a YAML file which includes a packaged task and sets one option keeps the others.
"""

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sbeval.errors import brief
from sbeval.foreign_files import parse_task_yaml, read_bytes
from sbeval.processes import ranks
from sbeval.task_metadata import OPTION, environment_settings, with_environment
from sbeval.variables import METADATA_VARIABLE

_PACKAGED = Path(__file__).parent.resolve()
_MOST_INCLUDED = 20
_said: set[str] = set()


def settled_metadata(task: str, metadata: Mapping[str, Any], options: Iterable[str]) -> dict[str, Any]:
    """Returns a task's metadata with the settings of its YAML file, of the files it includes, and of the environment.

    The run's metadata and `SBEVAL_METADATA` override the YAML file. For a user's own YAML file, one printed line says
    which options it sets and which of them are overridden.

    Args:
        task: its name.
        metadata: the metadata as lm-eval merges them: those of the YAML file below those of the run.
        options: names of the task's options.

    Raises:
        UserError: `SBEVAL_METADATA` cannot be read, or sets a key to another value than the run.
    """
    source = metadata.get("config_source")
    file = Path(source) if isinstance(source, str) and source.endswith((".yaml", ".yml")) else None
    of_file = {} if file is None else yaml_metadata(file)
    # values that differ from the file's are those of the run, or of a group that names the task
    of_run = {key: value for key, value in metadata.items() if key not in of_file or value != of_file[key]}
    settled = {**of_file, **with_environment(of_run, passed=f"the run ({OPTION}, or a group's YAML)")}
    if file is not None and not file.resolve().is_relative_to(_PACKAGED):
        _say_of_file(task, file, {key: of_file[key] for key in options if key in of_file}, settled)
    return settled


def yaml_metadata(file: Path, depth: int = 0) -> dict[str, Any]:
    """Returns the `metadata:` of a task's YAML file, with those of the files it includes below them.

    A file that cannot be read has none: lm-eval has read it before, or reports it.
    """
    settings: Any = None
    with contextlib.suppress(ValueError):  # `UserError` is one
        settings = parse_task_yaml(read_bytes(file))
    if not isinstance(settings, dict) or depth > _MOST_INCLUDED:
        return {}
    included = settings.get("include") or []
    merged: dict[str, Any] = {}
    for name in included if isinstance(included, list) else [included]:
        merged |= yaml_metadata(file.parent / str(name), depth + 1)
    metadata = settings.get("metadata")
    return merged | (metadata if isinstance(metadata, dict) else {})


def _say_of_file(task: str, file: Path, of_file: Mapping[str, Any], settled: Mapping[str, Any]) -> None:
    entry = settled.get(task)
    chosen = {**settled, **(entry if isinstance(entry, Mapping) else {})}
    given = environment_settings().settings
    given_entry = given.get(task)
    of_task = given_entry if isinstance(given_entry, Mapping) else {}
    for key, value in of_file.items():
        if chosen[key] is not None and chosen[key] != value:
            in_environment = key in given or key in of_task
            source = METADATA_VARIABLE if in_environment else OPTION
            _say(f"{task}: {key} is {brief(chosen[key])} from {source}, not {brief(value)} from {file.name}.")
    if kept := [key for key, value in of_file.items() if chosen[key] == value]:
        _say(f"{task}: {', '.join(kept)} from the metadata of {file.name}.")


def _say(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        ranks.print_on_rank_0(sentence)
