"""What one lm-eval run depends on: its settings, and the parts of everything that these name."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sbeval.errors import UserError
from sbeval.fingerprint.checkpoint import checkpoint_parts, hub_commit
from sbeval.fingerprint.parts import REVISION, Parts, named, versions
from sbeval.fingerprint.task_files import data_sha256, task_parts
from sbeval.results.records import LABEL

# arguments that name a checkpoint, an adapter or a tokenizer, and those that name data
_CHECKPOINTS = ("pretrained", "tokenizer", "peft", "delta", "longppl_evaluator")
_DATA = (
    *("data_path", "dataset", "essays", "squad", "hotpot"),
    *("trec", "banking77", "clinc150", "nlu", "examples_file"),
)
_FILE_OF = {"extrapolation": "longrope:"}
"""Arguments whose value may be a file behind this."""
_NAMING = ("model_args", "metadata")
# arguments of the model that say where something is kept, which no number depends on
KEPT_IN = frozenset({"cache_dir", "offload_folder", "logits_cache"})
_LOCAL = "a local file or folder"


class RunInputs(NamedTuple):
    """What two runs have to share for one's numbers to be the other's.

    Attributes:
        settings: the run's configuration by name ("limit", "model_args.dtype"), without where its results go and where
            its local inputs lie.
        parts: the inputs that it names, by content, and versions.
    """

    settings: dict[str, Any]
    parts: Parts


def run_inputs(config: Mapping[str, Any]) -> RunInputs:
    """Returns what a run depends on, as far as it is known before the run.

    Args:
        config: what lm-eval reads with `--config`: `model_args`, `tasks`, `metadata`, `include_path` and others.

    Raises:
        UserError: a file cannot be read.
    """
    arguments = config.get("model_args") or {}
    parts = versions()
    revision, subfolder = arguments.get("revision"), str(arguments.get("subfolder") or "")

    def read(given: Any, name: str, key: str) -> Any:
        """Adds the parts of what a value names; returns the value, without the place of what is local."""
        if isinstance(given, Mapping):
            return {key: read(inner, f"{name}.{key}", str(key)) for key, inner in given.items()}
        if not isinstance(given, str):
            return given
        value = given.removeprefix(_FILE_OF.get(key, ""))
        names_a_path = key in (*_CHECKPOINTS, *_DATA, *_FILE_OF) or "/" in value
        local = names_a_path and os.path.exists(os.path.expanduser(value))
        if key in _CHECKPOINTS:
            # hf hands both on to the model and its tokenizer, and adapters take the revision alone
            found = checkpoint_parts(
                value,
                revision=revision if key != "longppl_evaluator" else None,
                subfolder=subfolder if key in ("pretrained", "tokenizer") else "",
            )
            parts.update(found if name == "model_args.pretrained" else named(name.removeprefix("model_args."), found))
        elif local:
            parts[name.removeprefix("model_args.")] = data_sha256(value) or ""
        return _LOCAL if local else given

    try:
        settings = {
            f"{key}.{name}": read(value, f"{key}.{name}", str(name))
            for key in _NAMING
            for name, value in (config.get(key) or {}).items()
            if name not in KEPT_IN and (key, name) != ("metadata", LABEL)
        }
        folder = config.get("include_path")
        parts |= task_parts(Path(os.path.expanduser(folder)) if folder else None, config.get("tasks") or [])
    except OSError as error:
        raise UserError(
            f"Expected to read what the run depends on, found that {error.filename} cannot be read "
            f"({error.strerror}): check its permissions."
        ) from error
    left_out = {"output_path", *_NAMING} | (
        {"include_path"} if folder and Path(os.path.expanduser(folder)).is_dir() else set()
    )
    return RunInputs(settings | {key: value for key, value in config.items() if key not in left_out}, parts)


def data_revisions(configs: Mapping[str, Any]) -> Parts:
    """Returns the commits of the hub's data sets that a run's tasks have read, as far as the hub's cache names them.

    Args:
        configs: `configs` of a results file.
    """
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
    found = {name: hub_commit(name, "datasets", revision) for name, revision in names}
    return {f"{name} {REVISION}": commit for name, commit in sorted(found.items()) if commit}
