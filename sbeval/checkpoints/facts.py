"""What a loaded model's configuration says of its checkpoint: format and training length."""

from typing import Any


def text_config(config: Any) -> Any:
    """Returns the part of a configuration that describes the text model."""
    return getattr(config, "text_config", None) or config


def checkpoint_format(config: Any) -> str:
    """Returns "sbeval" for this project's family, else "huggingface:" and the model type."""
    model_type = getattr(config, "model_type", None) or type(config).__name__
    return "sbeval" if model_type == "sbeval" else f"huggingface:{model_type}"


def training_length_tokens(config: Any) -> int | None:
    """Returns the length a model was trained at, before any RoPE scaling; None where its configuration does not say."""
    config = text_config(config)
    if getattr(config, "model_type", None) == "sbeval":
        return length_tokens(config.training_length_tokens)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # models with several kinds of layers keep one set of parameters for each
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for found in [rope, *nested]:
        if length := length_tokens(found.get("original_max_position_embeddings")):
            return length
    for name in ("original_max_position_embeddings", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        if length := length_tokens(getattr(config, name, None)):
            return length
    return None


def length_tokens(value: Any) -> int | None:
    """Returns an entry of a configuration where it can be a length, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
