"""Configurations with the model sizes of Tan et al. 2025: dense models (Table 1), mixtures of experts (appendix)."""

from typing import Any

from sbeval.errors import UserError
from sbeval.models.config import SbevalConfig

# The paper gives layers, heads, widths and experts. With tied embeddings of 49,152 tokens these make 6.37 and 28.06
# billion parameters. With untied embeddings and a shared expert as wide as the others they make the 6.5 and 28.6
# billion (1 and 6 billion active) that the paper names, so that is what the presets have.
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


_COLUMNS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "tie_word_embeddings",
    "training_length_tokens",
)
_DENSE = {
    "350m": (32000, 1024, 2730, 24, 32, False, 2048),
    "1b": (49152, 1536, 4096, 40, 24, True, 4096),
    "3b": (50304, 2304, 9216, 40, 36, True, 4096),
}
_EXPERTS = ("hidden_size", "num_experts", "num_experts_per_token", "intermediate_size", "shared_intermediate_size")
_MIXTURES = {"moe-6.5b": (1536, 64, 8, 512, 512), "moe-28.6b": (4096, 72, 12, 768, 768)}
_SIZES: dict[str, dict[str, Any]] = {
    **{name: dict(zip(_COLUMNS, sizes, strict=True)) for name, sizes in _DENSE.items()},
    **{name: _MIXTURE | dict(zip(_EXPERTS, sizes, strict=True)) for name, sizes in _MIXTURES.items()},
}


def preset(name: str, **overrides: Any) -> SbevalConfig:
    """Returns the configuration of one of the paper's model sizes, with stick-breaking attention by default.

    Sizes are "350m", "1b", "3b", "moe-6.5b" and "moe-28.6b"; `overrides` are fields of `SbevalConfig`.

    Raises:
        UserError: there is no such preset, or a field is unknown.
    """
    if name not in _SIZES:
        raise UserError(f"preset must be one of {', '.join(_SIZES)}, got {name!r}")
    sizes = dict(_SIZES[name])
    if overrides.get("attention", "stickbreaking") != "stickbreaking":  # the paper's softmax models have neither field
        sizes.pop("remainder", None)
        sizes.pop("head_norm", None)
    return SbevalConfig(**{**sizes, **overrides})
