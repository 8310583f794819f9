"""Checkpoints of flash-linear-attention's stick-breaking model and the Forgetting Transformer, without their packages.

The latter is its authors' or flash-linear-attention's; the authors' softmax baselines are read as well:
`transformer-project_fox`, and their "pro" layers without forget gates.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sbeval.checkpoints.files import Weights
from sbeval.checkpoints.ignored import FLA, FLA_FORGETTING, FOX, FOX_SOFTMAX, Ignored
from sbeval.checkpoints.values import ConfigValues
from sbeval.models import SbevalConfig

STICKBREAKING_TYPE = "stickbreaking_attn"
FOX_TYPE, FOX_SOFTMAX_TYPE = "forgetting_transformer-project_fox", "transformer-project_fox"
FORGETTING_TYPE = "forgetting_transformer"
_FOX_TYPES = (FOX_TYPE, FOX_SOFTMAX_TYPE)
MODEL_TYPES = (STICKBREAKING_TYPE, FORGETTING_TYPE, *_FOX_TYPES)
_HEADS_NORM_EPS = 1e-5  # of queries and keys, in both packages whatever `norm_eps` says
Names = dict[str, tuple[str, tuple[int, ...]]]
"""A checkpoint's names and shapes of tensors by this family's names."""


def read_fla(source: Mapping[str, Any], weights: Weights) -> tuple[str, SbevalConfig, dict[str, Tensor]]:
    """Returns the format's name, this family's configuration and its tensors.

    The layout states no training length; it stays unknown unless the configuration holds `max_position_embeddings`.

    Raises:
        UserError: a part is not supported, or a tensor is missing, misshapen or has no place in the layout.
    """
    model_type = str(source["model_type"])
    breaks_sticks = model_type == STICKBREAKING_TYPE
    given = ConfigValues(source)
    given.one_of("hidden_act", ("swish", "silu") if breaks_sticks else ("swish",), "swish")
    fields = _shared_fields(given)
    fields["intermediate_size"] = weights.shape("model.layers.0.mlp.gate_proj.weight")[0]
    if model_type != FOX_SOFTMAX_TYPE:
        fields["qk_norm"] = given.get("qk_norm", bool, False)
    if model_type in (FOX_TYPE, FORGETTING_TYPE):
        fields["qk_norm_per_head"] = fields["qk_norm"]
        fields["qk_norm_eps"] = _HEADS_NORM_EPS if fields["qk_norm"] else None
        fields["attention_gate"] = given.get("use_output_gate", bool, False)
    if model_type in (STICKBREAKING_TYPE, FORGETTING_TYPE):
        fields["attention"] = "stickbreaking" if breaks_sticks else "forgetting"
        fields["bias"] = ["qkv"] if given.get("qkv_bias", bool, False) else []
        gates, ignored = ("none", FLA) if breaks_sticks else ("full", FLA_FORGETTING)
    else:
        gates, ignored = _add_fox_fields(fields, given, model_type)
    if breaks_sticks:
        fields["attend_current"] = given.get("attend_current", bool, False)
    config = SbevalConfig(**fields)
    given.refuse_unread(ignored, whole=True)
    tensors = _take(config, gates, model_type, weights)
    if config.tie_word_embeddings:
        weights.check_tied_head(tensors["model.embed_tokens.weight"])
    weights.refuse_left_over(f"fla {model_type}" if breaks_sticks else model_type)
    package = "fox" if model_type in _FOX_TYPES else "fla"
    return f"{package}:{model_type.removesuffix('-project_fox')}", config, tensors


def _shared_fields(given: ConfigValues) -> dict[str, Any]:
    """Returns the fields of this family's configuration that all these formats name alike."""
    return {
        "vocab_size": given.count("vocab_size", default=32000),
        "hidden_size": given.count("hidden_size", default=2048),
        "num_hidden_layers": given.count("num_hidden_layers", default=24),
        "num_attention_heads": given.count("num_heads", default=32),
        "num_key_value_heads": given.count("num_kv_heads", default=None),
        "norm_eps": given.get("norm_eps", float, 1e-6),
        "tie_word_embeddings": given.get("tie_word_embeddings", bool, False),
        "training_length_tokens": given.count("max_position_embeddings", default=None),
        "pad_token_id": given.token("pad_token_id"),
        "bos_token_id": given.token("bos_token_id", 1),
        "eos_token_id": given.token("eos_token_id", 2),
    }


def fla_names(config: SbevalConfig) -> Names:
    """Returns fla's names and shapes of a plain transformer by this family's names."""
    width = config.hidden_size
    inner = config.intermediate_size
    head_dim = config.head_dim
    key_width = config.num_key_value_heads * head_dim
    names: Names = {
        "model.embed_tokens.weight": ("model.embeddings.weight", (config.vocab_size, width)),
        "model.norm.weight": ("model.norm.weight", (width,)),
    }
    if not config.tie_word_embeddings:
        names["lm_head.weight"] = ("lm_head.weight", (config.vocab_size, width))
    block: Names = {
        "input_norm.weight": ("attn_norm.weight", (width,)),
        "post_attention_norm.weight": ("mlp_norm.weight", (width,)),
        "self_attn.o_proj.weight": ("attn.o_proj.weight", (width, width)),
        "mlp.gate_proj.weight": ("mlp.gate_proj.weight", (inner, width)),
        "mlp.up_proj.weight": ("mlp.up_proj.weight", (inner, width)),
        "mlp.down_proj.weight": ("mlp.down_proj.weight", (width, inner)),
    }
    for letter, rows in (("q", width), ("k", key_width), ("v", key_width)):
        block[f"self_attn.{letter}_proj.weight"] = (f"attn.{letter}_proj.weight", (rows, width))
        if "qkv" in config.bias:
            block[f"self_attn.{letter}_proj.bias"] = (f"attn.{letter}_proj.bias", (rows,))
        if config.qk_norm and letter != "v":
            block[f"self_attn.{letter}_norm.weight"] = (f"attn.{letter}_norm.weight", (head_dim,))
    for layer in range(config.num_hidden_layers):
        for ours, (theirs, shape) in block.items():
            names[f"model.layers.{layer}.{ours}"] = (f"model.layers.{layer}.{theirs}", shape)
    return names


def _add_fox_fields(fields: dict[str, Any], given: ConfigValues, model_type: str) -> tuple[str, Ignored]:
    """Returns what kind of gates the authors' model has, and which keys change nothing of it."""
    fields["intermediate_size"] //= 2  # gate and up are one map
    rotates = given.get("use_rope", bool, model_type == FOX_SOFTMAX_TYPE)
    base = given.get("rope_base", float, 500000.0)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": base} if rotates else None
    if model_type == FOX_SOFTMAX_TYPE:
        fields["attention"] = "rope" if rotates else "nope"
        fields["sliding_window"] = given.count("window_size", default=None)
        return "none", FOX_SOFTMAX
    gates = given.one_of("fgate_type", ("full", "bias_only", "fixed", "none"), "full")
    if gates != "none":
        fields["attention"] = "forgetting"
    else:
        fields["attention"] = "rope" if rotates else "nope"
    fields["qk_norm_per_head"] &= not given.get("qk_norm_share_param_across_head", bool, False)
    given.one_of("ogate_act", ("sigmoid",) if fields["attention_gate"] else ("sigmoid", "silu"), "sigmoid")
    for ours, theirs in (("output_norm", "output_norm"), ("key_shift", "k_shift"), ("value_shift", "v_shift")):
        fields[ours] = given.get(f"use_{theirs}", bool, False)
    return gates, FOX


def _take(config: SbevalConfig, gates: str, model_type: str, weights: Weights) -> dict[str, Tensor]:
    names = fla_names(config)
    fox = model_type in _FOX_TYPES
    width = config.hidden_size
    inner = config.intermediate_size
    heads = config.num_attention_heads
    shared_rows: dict[str, Tensor] = {}
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.attn"
        for letter, part, shifts in (("k", "key", config.key_shift), ("v", "value", config.value_shift)):
            if shifts:
                _, shape = names[f"{ours}.{letter}_proj.weight"]
                names[f"{ours}.{letter}_proj.weight"] = (f"{theirs}.{letter}_proj.linear.weight", shape)
                shares = (f"{theirs}.{letter}_proj.shift_proj.weight", (config.num_key_value_heads, width))
                names[f"{ours}.{part}_shift.weight"] = shares
        for norm in ("q_norm", "k_norm") if config.qk_norm_per_head else ():
            rows = heads if norm == "q_norm" else config.num_key_value_heads
            names[f"{ours}.{norm}.weight"] = (f"{theirs}.{norm}.weight", (rows * config.head_dim,))
        if config.attention_gate:
            names[f"{ours}.head_gate.weight"] = (f"{theirs}.{'ogate' if fox else 'g'}_proj.weight", (width, width))
        if config.output_norm:
            names[f"{ours}.output_norm.weight"] = (f"{theirs}.output_norm.weight", (width,))
        if gates == "full":
            gate = f"{theirs}.fgate_proj" if fox else f"{theirs}.f_proj"
            names[f"{ours}.forget_gate.weight"] = (f"{gate}.weight", (heads, width))
            names[f"{ours}.forget_gate.bias"] = (f"{gate}.bias", (heads,))
        elif gates != "none":
            names[f"{ours}.forget_gate.bias"] = (f"{theirs}.fgate_bias", (heads,))
        if fox:
            # one map, of which the gate has the first rows
            mlp = f"model.layers.{layer}.mlp"
            both = weights.take(f"{mlp}.gate_proj.weight", (2 * inner, width))
            del names[f"{mlp}.gate_proj.weight"], names[f"{mlp}.up_proj.weight"]
            shared_rows |= dict(zip((f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), both.chunk(2), strict=True))
    tensors = shared_rows | {name: weights.take(theirs, shape) for name, (theirs, shape) in names.items()}
    of_heads = ("output_norm.weight", *(("q_norm.weight", "k_norm.weight") if config.qk_norm_per_head else ()))
    tensors = {name: x.view(-1, config.head_dim) if name.endswith(of_heads) else x for name, x in tensors.items()}
    for layer in range(config.num_hidden_layers):
        ours = f"model.layers.{layer}.self_attn"
        if gates in ("bias_only", "fixed"):  # gates that do not look at the text
            tensors[f"{ours}.forget_gate.weight"] = torch.zeros(heads, width)
        if config.attention_gate and "qkv" in config.bias:
            tensors[f"{ours}.head_gate.bias"] = torch.zeros(width)
    return tensors
