"""Checkpoints of flash-linear-attention's stick-breaking model, without that package."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sbeval.checkpoints.files import Weights
from sbeval.checkpoints.ignored import FLA
from sbeval.checkpoints.layers import check_tied_head, refuse_left_over
from sbeval.checkpoints.values import ConfigValues
from sbeval.models import SbevalConfig

MODEL_TYPE = "stickbreaking_attn"


def read_fla(source: Mapping[str, Any], weights: Weights) -> tuple[str, SbevalConfig, dict[str, Tensor]]:
    """Returns the format's name, this family's configuration and its tensors.

    The layout states no training length; it stays unknown unless the configuration holds `max_position_embeddings`.

    Raises:
        UserError: a part is not supported, or a tensor is missing, misshapen or has no place in the layout.
    """
    given = ConfigValues(source)
    given.one_of("hidden_act", ("swish", "silu"), "swish")
    config = SbevalConfig(
        vocab_size=given.count("vocab_size", default=32000),
        hidden_size=given.count("hidden_size", default=2048),
        intermediate_size=weights.shape("model.layers.0.mlp.gate_proj.weight")[0],
        num_hidden_layers=given.count("num_hidden_layers", default=24),
        num_attention_heads=given.count("num_heads", default=32),
        num_key_value_heads=given.count("num_kv_heads", default=None),
        attention="stickbreaking",
        attend_current=given.get("attend_current", bool, False),
        qk_norm=given.get("qk_norm", bool, False),
        norm_eps=given.get("norm_eps", float, 1e-6),
        bias=["qkv"] if given.get("qkv_bias", bool, False) else [],
        tie_word_embeddings=given.get("tie_word_embeddings", bool, False),
        training_length_tokens=given.count("max_position_embeddings", default=None),
        pad_token_id=given.token("pad_token_id"),
        bos_token_id=given.token("bos_token_id", 1),
        eos_token_id=given.token("eos_token_id", 2),
    )
    given.refuse_unread(FLA, whole=True)
    tensors = {ours: weights.take(theirs, shape) for ours, (theirs, shape) in fla_names(config).items()}
    if config.tie_word_embeddings:
        check_tied_head(weights, tensors["model.embed_tokens.weight"])
    refuse_left_over(weights.left_over(), f"fla {MODEL_TYPE}")
    return f"fla:{MODEL_TYPE}", config, tensors


def fla_names(config: SbevalConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns fla's names and shapes of a plain transformer by this family's names."""
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
