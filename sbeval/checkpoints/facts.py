"""What a configuration says of its checkpoint, loaded or on disk: format, training length, longest input."""

import contextlib
from pathlib import Path
from typing import Any, Literal

from sbeval.errors import UserError, shown
from sbeval.foreign_files import read_json_object
from sbeval.hub_names import local_path
from sbeval.rope_parameters import rope_entries

KvExpand = Literal["auto", "interleave", "tile"]
"""How grouped query heads share keys and values; auto is what the checkpoint's generation did."""


LENGTH_KEYS = ("original_max_position_embeddings", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
"""Keys that state the length a model was trained at, the likelier ones first."""


def text_config(config: Any) -> Any:
    """Returns the part of a configuration that describes the text model."""
    return getattr(config, "text_config", None) or config


def checkpoint_format(config: Any) -> str:
    """Returns "sbeval" for this project's family, else "huggingface:" and the model type."""
    model_type = getattr(config, "model_type", None) or type(config).__name__
    return "sbeval" if model_type == "sbeval" else f"huggingface:{model_type}"


def training_length_tokens(config: Any) -> int | None:
    """Returns the length a model was trained at, before any RoPE scaling; None where its configuration does not say.

    A model that `sbeval extend` trained was trained at its longest position, with the scaling that it has.
    """
    extended = isinstance(getattr(config, "extended_from", None), dict)
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
    """Returns the longest context that a configuration declares, None where it does not say."""
    config = text_config(config)
    if getattr(config, "model_type", None) == "sbeval" and config.training_length_tokens is None:
        return None  # what stands there is a default for other software
    return positive(getattr(config, "max_position_embeddings", None)) or training_length_tokens(config)


def positive(value: Any) -> int | None:
    """Returns a positive whole number, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def local_config(pretrained: object) -> dict[str, Any]:
    """Returns the configuration of a checkpoint folder, nothing for a hub id, a model, or a folder that has none.

    Raises:
        UserError: there is one that cannot be read.
    """
    path = local_path(pretrained) / "config.json" if isinstance(pretrained, str | Path) else None
    return read_json_object(path, "the configuration of a checkpoint") if path and path.is_file() else {}


def longest_input_tokens(pretrained: object) -> int | None:
    """Returns the longest input that a checkpoint folder's configuration allows, None where it does not say."""
    config = local_config(pretrained)
    stated = (config.get(key) for key in ("n_positions", "max_position_embeddings", "n_ctx"))
    return next((tokens for value in stated if (tokens := positive(value))), None)


def refuse_adapter(folder: Path) -> None:
    """Refuses the folder of a PEFT adapter in a model's place; with a model beside it, transformers loads both.

    Raises:
        UserError: naming the model that the adapter says it was trained on.
    """
    path = folder / "adapter_config.json"
    if not path.is_file() or (folder / "config.json").exists():
        return
    base = None
    with contextlib.suppress(UserError):
        base = read_json_object(path, "the configuration of an adapter").get("base_model_name_or_path")
    trained_on = f" ({shown(base)} by adapter_config.json)" if isinstance(base, str) and base else ""
    raise UserError(
        f"Expected a model in {folder}, found a PEFT adapter: name the model that it was trained on{trained_on}, and "
        f"pass peft={folder} in --model_args."
    )
