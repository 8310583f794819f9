"""The fingerprint of one lm-eval run: its settings, and the checkpoints, tasks and data that they name."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sbeval.caches.choice import cache_parts
from sbeval.errors import UserError
from sbeval.fingerprint.checkpoint import checkpoint_parts
from sbeval.fingerprint.parts import REVISION, Parts, named, versions
from sbeval.fingerprint.tasks import CACHE_ARGUMENTS, DATA, NO_NAME, data_sha256, may_be_read, task_parts
from sbeval.hub_names import hub_commit
from sbeval.results.records import LABEL
from sbeval.task_metadata import with_environment

# arguments that name a checkpoint, an adapter or a tokenizer
_CHECKPOINTS = ("pretrained", "tokenizer", "peft", "delta", "longppl_evaluator")
_FILE_OF = {"extrapolation": "longrope:"}
"""Arguments of the model whose value may name a file: maps an argument to the prefix before the file's path."""
_NAMING = ("model_args", "metadata")
_LOCAL = "a local file or folder"


class RunInputs(NamedTuple):
    """Everything that the results of a run depend on. Results are reused for a run with equal inputs.

    Attributes:
        settings: the configuration by name ("limit", "model_args.dtype"), without output paths; paths of local inputs
            are replaced by a placeholder.
        parts: hashes of the inputs that the configuration names, and versions of packages.
    """

    settings: dict[str, Any]
    parts: Parts


def run_inputs(config: Mapping[str, Any]) -> RunInputs:
    """Computes the inputs of a run before it starts.

    Args:
        config: the run's configuration, as lm-eval reads it with `--config`.

    Raises:
        UserError: a file cannot be read, or `SBEVAL_METADATA` sets a key to another value than the configuration.
    """
    arguments = config.get("model_args") or {}
    config = {**config, "metadata": with_environment(config.get("metadata") or {})}
    parts = versions() | cache_parts(arguments.get("cache"))
    revision = arguments.get("revision")
    subfolder = str(arguments.get("subfolder") or "")

    def read(setting: Any, name: str, key: str) -> Any:
        """Adds the parts of the files that a value names; returns the value, or a placeholder for a local path."""
        if isinstance(setting, Mapping):
            return {
                key: read(inner, f"{name}.{key}", str(key))
                for key, inner in setting.items()
                if key not in CACHE_ARGUMENTS
            }
        if not isinstance(setting, str) or NO_NAME.search(setting):
            return setting
        value = setting.removeprefix(_FILE_OF.get(key, ""))
        if key in _CHECKPOINTS:
            local = os.path.exists(os.path.expanduser(value))
            # hf passes revision and subfolder to model and tokenizer, and only the revision to adapters
            loaded_parts = checkpoint_parts(
                value,
                revision=revision if key != "longppl_evaluator" else None,
                subfolder=subfolder if key in ("pretrained", "tokenizer") else "",
            )
            if name != "model_args.pretrained":
                loaded_parts = named(name.removeprefix("model_args."), loaded_parts)
            parts.update(loaded_parts)
        else:
            content = data_sha256(value) if key in (*DATA, *_FILE_OF) or may_be_read(value) else None
            if local := content is not None:
                parts[name.removeprefix("model_args.")] = content
        return _LOCAL if local else setting

    try:
        settings = {
            f"{key}.{name}": read(value, f"{key}.{name}", str(name))
            for key in _NAMING
            for name, value in (config.get(key) or {}).items()
            if name not in CACHE_ARGUMENTS and (key, name) != ("metadata", LABEL)
        }
        folder = config.get("include_path")
        used_paths = [config.get("output_path"), arguments.get("pretrained")]
        cache_paths = [arguments.get(key) for key in CACHE_ARGUMENTS]
        in_use = [os.path.expanduser(str(path)) for path in used_paths if path]
        caches = [os.path.expanduser(str(path)) for path in cache_paths if path]
        task_folder = Path(os.path.expanduser(folder)) if folder else None
        parts |= task_parts(task_folder, config.get("tasks") or [], in_use, caches)
    except OSError as error:
        raise UserError(
            f"{error.filename}, which the run depends on, cannot be read ({error.strerror}): check its permissions."
        ) from error
    left_out = {"output_path", *_NAMING}
    if task_folder is not None and task_folder.is_dir():
        left_out.add("include_path")
    return RunInputs(settings | {key: value for key, value in config.items() if key not in left_out}, parts)


def data_revisions(configs: Mapping[str, Any]) -> Parts:
    """Returns the commits, in the hub's cache, of the data sets in a results file's `configs`."""
    names = set[tuple[str, str | None]]()
    for config in configs.values():
        config = config if isinstance(config, dict) else {}
        options = config.get("dataset_kwargs")
        revision = options.get("revision") if isinstance(options, dict) else None
        names.add((str(config.get("dataset_path")), str(revision) if revision else None))
        metadata = config.get("metadata")
        record = metadata.get("sbeval") if isinstance(metadata, dict) else None
        detail = record.get("corpus_detail") if isinstance(record, dict) else None
        if isinstance(detail, str):  # "owner/name/configuration:split"
            names.add(("/".join(detail.partition(":")[0].partition(",")[0].split("/")[:2]), None))
    commits = {name: hub_commit(name, "datasets", revision) for name, revision in names}
    return {f"{name} {REVISION}": commit for name, commit in sorted(commits.items()) if commit}
