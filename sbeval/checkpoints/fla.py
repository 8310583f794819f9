"""Checkpoints of flash-linear-attention's stick-breaking model, without that package."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sbeval.checkpoints.files import Weights
from sbeval.checkpoints.layers import refuse_left_over
from sbeval.errors import UserError
from sbeval.models import SbevalConfig

MODEL_TYPE = "stickbreaking_attn"

_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_heads": 32,
    "num_kv_heads": None,
    "qkv_bias": False,
    "qk_norm": False,
    "attend_current": False,
    "hidden_act": "swish",
    "norm_eps": 1e-6,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "max_position_embeddings": None,
}


def read_fla(source: Mapping[str, Any], weights: Weights) -> tuple[str, SbevalConfig, dict[str, Tensor]]:
    """Returns the format's name, this family's configuration and its tensors.

    The layout states no training length; it stays unknown unless the configuration holds `max_position_embeddings`.

    Raises:
        UserError: a part is not supported, or a tensor is missing, misshapen or has no place in the layout.
    """
    given = {name: source.get(name, default) for name, default in _DEFAULTS.items()}
    if given["hidden_act"] not in ("swish", "silu"):
        raise UserError(
            f"hidden_act {given['hidden_act']!r} of the MLP in layer 0 is not supported; supported is swish"
        )
    config = SbevalConfig(
        vocab_size=given["vocab_size"],
        hidden_size=given["hidden_size"],
        intermediate_size=weights.shape("model.layers.0.mlp.gate_proj.weight")[0],
        num_hidden_layers=given["num_hidden_layers"],
        num_attention_heads=given["num_heads"],
        num_key_value_heads=given["num_kv_heads"],
        attention="stickbreaking",
        attend_current=given["attend_current"],
        qk_norm=given["qk_norm"],
        norm_eps=given["norm_eps"],
        bias=["qkv"] if given["qkv_bias"] else [],
        tie_word_embeddings=given["tie_word_embeddings"],
        training_length_tokens=given["max_position_embeddings"],
        pad_token_id=given["pad_token_id"],
        bos_token_id=given["bos_token_id"],
        eos_token_id=given["eos_token_id"],
    )
    tensors = {ours: weights.take(theirs, shape) for ours, (theirs, shape) in _names(config).items()}
    if config.tie_word_embeddings and "lm_head.weight" in weights:
        weights.drop(["lm_head.weight"])
    refuse_left_over(weights.left_over(), f"fla {MODEL_TYPE}")
    return f"fla:{MODEL_TYPE}", config, tensors


def _names(config: SbevalConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """From this family's names to fla's names and shapes."""
    assert config.head_dim is not None
    assert config.num_key_value_heads is not None
    assert isinstance(config.bias, list)
    width, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    key_width = config.num_key_value_heads * head_dim
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("model.embeddings.weight", (config.vocab_size, width)),
        "model.norm.weight": ("model.norm.weight", (width,)),
    }
    if not config.tie_word_embeddings:
        names["lm_head.weight"] = ("lm_head.weight", (config.vocab_size, width))
    block: dict[str, tuple[str, tuple[int, ...]]] = {
        "input_norm.weight": ("attn_norm.weight", (width,)),
        "post_attention_norm.weight": ("mlp_norm.weight", (width,)),
        "self_attn.o_proj.weight": ("attn.o_proj.weight", (width, width)),
        "mlp.gate_proj.weight": ("mlp.gate_proj.weight", (inner, width)),
        "mlp.up_proj.weight": ("mlp.up_proj.weight", (inner, width)),
        "mlp.down_proj.weight": ("mlp.down_proj.weight", (width, inner)),
    }
    for part, rows in (("q", width), ("k", key_width), ("v", key_width)):
        block[f"self_attn.{part}_proj.weight"] = (f"attn.{part}_proj.weight", (rows, width))
        if "qkv" in config.bias:
            block[f"self_attn.{part}_proj.bias"] = (f"attn.{part}_proj.bias", (rows,))
        if config.qk_norm and part != "v":
            block[f"self_attn.{part}_norm.weight"] = (f"attn.{part}_norm.weight", (head_dim,))
    for layer in range(config.num_hidden_layers):
        for ours, (theirs, shape) in block.items():
            names[f"model.layers.{layer}.{ours}"] = (f"model.layers.{layer}.{theirs}", shape)
    return names
