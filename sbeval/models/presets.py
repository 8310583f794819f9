"""The paper's model sizes (Tan et al. 2025, Table 1)."""

from typing import Any

from sbeval.errors import UserError
from sbeval.models.config import SbevalConfig

_SIZES: dict[str, dict[str, Any]] = {
    "350m": {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2730,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
        "training_length_tokens": 2048,
    },
    "1b": {
        "vocab_size": 49152,
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 40,
        "num_attention_heads": 24,
        "tie_word_embeddings": True,
        "training_length_tokens": 4096,
    },
    "3b": {
        "vocab_size": 50304,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 40,
        "num_attention_heads": 36,
        "tie_word_embeddings": True,
        "training_length_tokens": 4096,
    },
}


def preset(name: str, **overrides: Any) -> SbevalConfig:
    """Returns the configuration of one of the paper's sizes, stick-breaking unless overridden.

    Args:
        name: "350m", "1b" or "3b".
        overrides: fields of `SbevalConfig` that differ from the preset.

    Raises:
        UserError: there is no such preset, or a field is unknown.
    """
    if name not in _SIZES:
        raise UserError(f"preset must be one of {', '.join(_SIZES)}, got {name!r}")
    return SbevalConfig(**{**_SIZES[name], **overrides})
