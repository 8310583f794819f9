"""Reads `SBEVAL_METADATA`, which holds task settings for programs that run lm-eval and do not pass `--metadata` on.

The variable holds what `--metadata` takes: a JSON object, or the path of a JSON or YAML file with such an object. Both
may be used together. A setting that both hold with different values is an error, since neither of them is the default
of the other.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sbeval.errors import UserError, brief
from sbeval.foreign_files import parse_json, read_json_object, read_yaml
from sbeval.hub_names import local_path
from sbeval.processes import ranks
from sbeval.variables import METADATA_VARIABLE as VARIABLE

OPTION = "--metadata"
_WHAT = f"the settings of tasks that {VARIABLE} names"
_said: set[str] = set()


class Given(NamedTuple):
    """The settings in `SBEVAL_METADATA`, and the file that it names; None if the variable itself holds them."""

    settings: Mapping[str, Any]
    file: Path | None

    @property
    def source(self) -> str:
        """The variable's name, and the file's if there is one, for messages."""
        return VARIABLE if self.file is None else f"{VARIABLE} (the file {self.file})"


def environment_settings() -> Given:
    """Reads `SBEVAL_METADATA`; returns no settings if it is not set or blank.

    Raises:
        UserError: it holds neither a JSON object nor the path of a file with one.
    """
    text = os.environ.get(VARIABLE, "").strip()
    file = None
    if not text:
        return Given({}, None)
    if text.startswith("{"):
        try:
            settings = parse_json(text)
        except UserError as error:
            raise UserError(f"{VARIABLE} holds {brief(text)}, and {error}: write a JSON object.") from None
    else:
        file = local_path(text)
        if not file.is_file():
            raise UserError(
                f"{VARIABLE} holds {brief(text)}, which is neither a JSON object nor a file: correct it, or unset it."
            )
        is_json = file.suffix == ".json"
        settings = read_json_object(file, _WHAT) if is_json else read_yaml(file, _WHAT)
    if not has_text_keys(settings):
        raise UserError(f"{VARIABLE} holds {brief(settings)}, in which some key is no text: write quotes around it.")
    return Given(settings, file)


def has_text_keys(value: Any) -> bool:
    """Whether a value is a mapping whose keys are text at every level, as in the JSON of results files."""
    return isinstance(value, Mapping) and all(
        isinstance(key, str) and (not isinstance(inner, Mapping) or has_text_keys(inner))
        for key, inner in value.items()
    )


def with_environment(metadata: Mapping[str, Any], *, passed: str = f"{OPTION} or --model_args") -> dict[str, Any]:
    """Returns a run's metadata together with the settings in `SBEVAL_METADATA`.

    Settings under one task's name are merged key by key.

    Args:
        metadata: the metadata of the run, which may include the model's arguments.
        passed: where they come from, for messages.

    Raises:
        UserError: `SBEVAL_METADATA` cannot be read, or sets a key to another value than `metadata`.
    """
    given = environment_settings()
    return _merged(metadata, given.settings, given.source, passed)


def _merged(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], source: str, passed: str, of: str = ""
) -> dict[str, Any]:
    merged = dict(ours)
    for key, value in theirs.items():
        present = merged.get(key)
        if value is None:  # null counts as not set
            continue
        if isinstance(present, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(present, value, source, passed, f" of {key}")
        elif present is None or _as_json(present) == _as_json(value):
            merged[key] = value
        else:
            raise UserError(
                f"{source} sets {key}{of} to {brief(value)}, and {passed} sets it to {brief(present)}: remove one of "
                "the two."
            )
    return merged


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def settings_source() -> str:
    """Returns where a run's task settings come from, for messages about a key or value in them."""
    return OPTION if not os.environ.get(VARIABLE, "").strip() else f"{OPTION} and {VARIABLE}"


def say_sources(metadata: Mapping[str, Any]) -> None:
    """Prints which task settings of a run come from where, once in a process and on rank 0 only.

    `metadata` are the settings of `--metadata`, without the model's arguments.

    Raises:
        UserError: `SBEVAL_METADATA` cannot be read.
    """
    given = environment_settings()
    by_source = {given.source: list(given.settings), OPTION: [key for key in metadata if key not in given.settings]}
    parts = {source: f"{', '.join(sorted(keys))} from {source}" for source, keys in by_source.items() if keys}
    if parts and not _said.issuperset(parts):
        _said.update(parts)
        ranks.print_on_rank_0(f"Task settings: {'; '.join(parts.values())}.")
