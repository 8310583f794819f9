"""Facts from a checkpoint's configuration: format, training length, longest input."""

import contextlib
from pathlib import Path
from typing import Any, Literal

from sbeval.errors import UserError, brief
from sbeval.foreign_files import read_json_object
from sbeval.hub_names import local_path
from sbeval.rope_parameters import rope_entries

KvExpand = Literal["auto", "interleave", "tile"]
"""Which key/value head a query head uses in grouped-query attention; "auto" follows the checkpoint's generation."""


LENGTH_KEYS = ("original_max_position_embeddings", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
"""Keys of a configuration that may hold the training length, in order of preference."""


def text_config(config: Any) -> Any:
    """Returns the `text_config` of a multimodal configuration, or the configuration itself."""
    return getattr(config, "text_config", None) or config


def checkpoint_format(config: Any) -> str:
    """Returns "sbeval" for sbeval models, otherwise "huggingface:" followed by the model type."""
    model_type = getattr(config, "model_type", None) or type(config).__name__
    return "sbeval" if model_type == "sbeval" else f"huggingface:{model_type}"


def extended_from(config: Any) -> dict[str, Any] | None:
    """Returns what a configuration says about the checkpoint whose context was extended, or None.

    In a multimodal checkpoint `sbeval extend` writes it into the text configuration.
    """
    parents = (getattr(candidate, "extended_from", None) for candidate in (config, text_config(config)))
    return next((parent for parent in parents if isinstance(parent, dict)), None)


def training_length_tokens(config: Any) -> int | None:
    """Returns the training length before any RoPE scaling, or None if the configuration does not contain it.

    For a model made by `sbeval extend`, this is the model's number of positions, with the RoPE scaling used in
    training.
    """
    extended = extended_from(config) is not None
    config = text_config(config)
    if getattr(config, "model_type", None) == "sbeval":
        return positive(config.training_length_tokens)
    if extended and (length := positive(getattr(config, "max_position_embeddings", None))):
        return length
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    for scaling in ([rope] if isinstance(rope, dict) else []) + list(rope_entries(rope).values()):
        if length := positive(scaling.get("original_max_position_embeddings")):
            return length
    for name in LENGTH_KEYS:
        if length := positive(getattr(config, name, None)):
            return length
    return None


def declared_length_tokens(config: Any) -> int | None:
    """Returns the longest context that a configuration declares, or None if it declares none."""
    config = text_config(config)
    if getattr(config, "model_type", None) == "sbeval" and config.training_length_tokens is None:
        return None  # its max_position_embeddings is then only a default for other software
    return positive(getattr(config, "max_position_embeddings", None)) or training_length_tokens(config)


def positive(value: Any) -> int | None:
    """Returns the value if it is a positive integer, otherwise None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def local_config(pretrained: object) -> dict[str, Any]:
    """Returns the contents of config.json in a checkpoint folder.

    Returns an empty dictionary for a hub id, a model object, or a folder without config.json.

    Raises:
        UserError: config.json cannot be read.
    """
    path = local_path(pretrained) / "config.json" if isinstance(pretrained, str | Path) else None
    return read_json_object(path, "the configuration of a checkpoint") if path and path.is_file() else {}


def longest_input_tokens(pretrained: object) -> int | None:
    """Returns the longest input that config.json of a checkpoint folder allows, or None if it has no such key."""
    config = local_config(pretrained)
    stated = (config.get(key) for key in ("n_positions", "max_position_embeddings", "n_ctx"))
    return next((tokens for value in stated if (tokens := positive(value))), None)


def refuse_adapter(folder: Path) -> None:
    """Checks that a folder is not that of a PEFT adapter without a model.

    If the folder also holds a config.json, transformers loads both the model and the adapter.

    Raises:
        UserError: it is an adapter; the message names the model that it was trained on.
    """
    path = folder / "adapter_config.json"
    if not path.is_file() or (folder / "config.json").exists():
        return
    base = None
    with contextlib.suppress(UserError):
        base = read_json_object(path, "the configuration of an adapter").get("base_model_name_or_path")
    trained_on = f" ({brief(base)} by adapter_config.json)" if isinstance(base, str) and base else ""
    raise UserError(
        f"Expected a model in {folder}, found a PEFT adapter: pass the model that it was trained on{trained_on} as "
        f"pretrained, and peft={folder} in --model_args."
    )
