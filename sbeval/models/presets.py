"""The paper's model sizes (Tan et al. 2025, Table 1), and its mixtures of experts (appendix)."""

from typing import Any

from sbeval.errors import UserError
from sbeval.models.config import SbevalConfig

# The text gives layers, heads, widths and experts, which with tied embeddings of 49,152 tokens are 6.37 and 28.06
# billion parameters. Untied, and with a shared expert as wide as the others, they are the 6.5 and 28.6 billion that it
# names, and the 1 and 6 billion active ones.
_MIXTURE: dict[str, Any] = {
    "vocab_size": 49152,
    "num_hidden_layers": 40,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "remainder": "head_bias",
    "head_norm": True,
    "tie_word_embeddings": False,
    "training_length_tokens": 4096,
}


def _experts(number: int, *, chosen: int, width: int) -> dict[str, Any]:
    return {
        "num_experts": number,
        "num_experts_per_token": chosen,
        "intermediate_size": width,
        "shared_intermediate_size": width,
    }


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
    "moe-6.5b": {**_MIXTURE, "hidden_size": 1536, **_experts(64, chosen=8, width=512)},
    "moe-28.6b": {**_MIXTURE, "hidden_size": 4096, **_experts(72, chosen=12, width=768)},
}


def preset(name: str, **overrides: Any) -> SbevalConfig:
    """Returns the configuration of one of the paper's sizes, stick-breaking unless overridden.

    Args:
        name: "350m", "1b", "3b", "moe-6.5b" or "moe-28.6b".
        overrides: fields of `SbevalConfig` that differ from the preset.

    Raises:
        UserError: there is no such preset, or a field is unknown.
    """
    if name not in _SIZES:
        raise UserError(f"preset must be one of {', '.join(_SIZES)}, got {name!r}")
    sizes = dict(_SIZES[name])
    if overrides.get("attention", "stickbreaking") != "stickbreaking":  # the paper's softmax models have neither
        sizes.pop("remainder", None)
        sizes.pop("head_norm", None)
    return SbevalConfig(**{**sizes, **overrides})
