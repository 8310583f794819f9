"""What one lm-eval run depends on: its settings, and the parts of everything that these name."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sbeval.errors import UserError
from sbeval.fingerprint.checkpoint import checkpoint_parts
from sbeval.fingerprint.parts import REVISION, Parts, named, versions
from sbeval.fingerprint.tasks import DATA, KEPT_IN, NO_NAME, data_sha256, may_be_read, task_parts
from sbeval.hub_names import hub_commit
from sbeval.results.records import LABEL

# arguments that name a checkpoint, an adapter or a tokenizer
_CHECKPOINTS = ("pretrained", "tokenizer", "peft", "delta", "longppl_evaluator")
_FILE_OF = {"extrapolation": "longrope:"}
"""Arguments whose value may be a file behind this."""
_NAMING = ("model_args", "metadata")
_LOCAL = "a local file or folder"


class RunInputs(NamedTuple):
    """What two runs have to share for one's numbers to be the other's.

    The configuration by name ("limit", "model_args.dtype"), without where its results go and where its local inputs
    lie; and the parts of the inputs that it names, by content, with versions.
    """

    settings: dict[str, Any]
    parts: Parts


def run_inputs(config: Mapping[str, Any]) -> RunInputs:
    """Returns what a run depends on, as far as it is known before the run, from what lm-eval reads with `--config`.

    Raises:
        UserError: a file cannot be read.
    """
    arguments = config.get("model_args") or {}
    parts = versions()
    revision = arguments.get("revision")
    subfolder = str(arguments.get("subfolder") or "")

    def read(given: Any, name: str, key: str) -> Any:
        """Adds the parts of what a value names; returns the value, without the place of what is local."""
        if isinstance(given, Mapping):
            return {key: read(inner, f"{name}.{key}", str(key)) for key, inner in given.items() if key not in KEPT_IN}
        if not isinstance(given, str) or NO_NAME.search(given):
            return given
        value = given.removeprefix(_FILE_OF.get(key, ""))
        if key in _CHECKPOINTS:
            local = os.path.exists(os.path.expanduser(value))
            # hf hands both on to the model and its tokenizer, and adapters take the revision alone
            held = checkpoint_parts(
                value,
                revision=revision if key != "longppl_evaluator" else None,
                subfolder=subfolder if key in ("pretrained", "tokenizer") else "",
            )
            parts.update(held if name == "model_args.pretrained" else named(name.removeprefix("model_args."), held))
        else:
            content = data_sha256(value) if key in (*DATA, *_FILE_OF) or may_be_read(value) else None
            if local := content is not None:
                parts[name.removeprefix("model_args.")] = content
        return _LOCAL if local else given

    try:
        settings = {
            f"{key}.{name}": read(value, f"{key}.{name}", str(name))
            for key in _NAMING
            for name, value in (config.get(key) or {}).items()
            if name not in KEPT_IN and (key, name) != ("metadata", LABEL)
        }
        folder = config.get("include_path")
        used = (config.get("output_path"), arguments.get("pretrained"))
        in_use, kept = (
            [os.path.expanduser(str(name)) for name in places if name]
            for places in (used, [arguments.get(key) for key in KEPT_IN])
        )
        place = Path(os.path.expanduser(folder)) if folder else None
        parts |= task_parts(place, config.get("tasks") or [], in_use, kept)
    except OSError as error:
        raise UserError(
            f"Expected to read what the run depends on, found that {error.filename} cannot be read "
            f"({error.strerror}): check its permissions."
        ) from error
    left_out = {"output_path", *_NAMING}
    if place is not None and place.is_dir():
        left_out.add("include_path")
    return RunInputs(settings | {key: value for key, value in config.items() if key not in left_out}, parts)


def data_revisions(configs: Mapping[str, Any]) -> Parts:
    """Returns the commits that the hub's cache names for the data sets in the `configs` of a results file."""
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
