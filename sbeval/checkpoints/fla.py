"""Reads checkpoints of flash-linear-attention (stick-breaking attention) and of the Forgetting Transformer (FoX).

The packages that wrote them are not needed. Forgetting Transformers are read in the format of flash-linear-attention
and in that of the paper's authors. Softmax baselines that the authors' code wrote are read as well:
`transformer-project_fox`, and models with "pro" layers but without forget gates.
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
_SIZES = {"vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 32}
_QK_NORM_EPS = 1e-5  # epsilon of the QK norm: both packages ignore `norm_eps` there
Names = dict[str, tuple[str, tuple[int, ...]]]
"""Maps a tensor name in the loaded model to its name and shape in the checkpoint."""


def read_fla(source: Mapping[str, Any], weights: Weights) -> tuple[str, SbevalConfig, dict[str, Tensor]]:
    """Reads the configuration and the tensors of one of these formats.

    The training length is `max_position_embeddings`, or unknown if the configuration does not have that key.

    Returns:
        The name of the format, the configuration, and the state dict of `SbevalForCausalLM`.

    Raises:
        UserError: a feature is not supported, or a tensor is missing, has a wrong shape or is unknown.
    """
    model_type = str(source["model_type"])
    is_stickbreaking = model_type == STICKBREAKING_TYPE
    values = ConfigValues(source)
    values.one_of("hidden_act", ("swish", "silu") if is_stickbreaking else ("swish",), "swish")
    fields = shared_fields(values, _SIZES)
    fields["intermediate_size"] = weights.shape("model.layers.0.mlp.gate_proj.weight")[0]
    if model_type != FOX_SOFTMAX_TYPE:
        fields["qk_norm"] = values.get("qk_norm", bool, False)
    if model_type in (FOX_TYPE, FORGETTING_TYPE):
        fields["qk_norm_per_head"] = fields["qk_norm"]
        fields["qk_norm_eps"] = _QK_NORM_EPS if fields["qk_norm"] else None
        fields["attention_gate"] = values.get("use_output_gate", bool, False)
    if model_type in (STICKBREAKING_TYPE, FORGETTING_TYPE):
        fields["attention"] = "stickbreaking" if is_stickbreaking else "forgetting"
        fields["bias"] = ["qkv"] if values.get("qkv_bias", bool, False) else []
        gates, ignored = ("none", FLA) if is_stickbreaking else ("full", FLA_FORGETTING)
    else:
        gates, ignored = _add_fox_fields(fields, values, model_type)
    if is_stickbreaking:
        fields["attend_current"] = values.get("attend_current", bool, False)
    config = SbevalConfig(**fields)
    values.refuse_unread(ignored, whole=True)
    tensors = _take(config, gates, model_type, weights)
    if config.tie_word_embeddings:
        weights.check_tied_head(tensors["model.embed_tokens.weight"])
    weights.refuse_left_over(f"fla {model_type}" if is_stickbreaking else model_type)
    package = "fox" if model_type in _FOX_TYPES else "fla"
    return f"{package}:{model_type.removesuffix('-project_fox')}", config, tensors


def shared_fields(values: ConfigValues, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Returns the fields of `SbevalConfig` whose keys are the same in all these formats.

    `sizes` are the defaults of `vocab_size`, `hidden_size`, `num_hidden_layers` and `num_heads`.
    """
    vocabulary, width, layers, heads = (values.count(name, default=size) for name, size in sizes.items())
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": values.count("num_kv_heads", default=None),
        "norm_eps": values.get("norm_eps", float, 1e-6),
        "tie_word_embeddings": values.get("tie_word_embeddings", bool, False),
        "training_length_tokens": values.count("max_position_embeddings", default=None),
        "pad_token_id": values.token("pad_token_id"),
        "bos_token_id": values.token("bos_token_id", 1),
        "eos_token_id": values.token("eos_token_id", 2),
    }


def fla_names(config: SbevalConfig) -> Names:
    """Maps tensor names of a plain transformer in an sbeval model to flash-linear-attention's names and shapes."""
    width, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
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
            norm_width = rows if config.qk_norm_over_heads else head_dim
            block[f"self_attn.{letter}_norm.weight"] = (f"attn.{letter}_norm.weight", (norm_width,))
    for layer in range(config.num_hidden_layers):
        for ours, (theirs, shape) in block.items():
            names[f"model.layers.{layer}.{ours}"] = (f"model.layers.{layer}.{theirs}", shape)
    return names


def _add_fox_fields(fields: dict[str, Any], values: ConfigValues, model_type: str) -> tuple[str, Ignored]:
    """Adds the fields of a FoX model to `fields`; returns its kind of forget gates and the ignored keys."""
    fields["intermediate_size"] //= 2  # gate and up projection are one matrix
    rotates = values.get("use_rope", bool, model_type == FOX_SOFTMAX_TYPE)
    base = values.get("rope_base", float, 500000.0)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": base} if rotates else None
    if model_type == FOX_SOFTMAX_TYPE:
        fields["attention"] = "rope" if rotates else "nope"
        fields["sliding_window"] = values.count("window_size", default=None)
        return "none", FOX_SOFTMAX
    gates = values.one_of("fgate_type", ("full", "bias_only", "fixed", "none"), "full")
    fields["attention"] = "forgetting" if gates != "none" else "rope" if rotates else "nope"
    fields["qk_norm_per_head"] &= not values.get("qk_norm_share_param_across_head", bool, False)
    values.one_of("ogate_act", ("sigmoid",) if fields["attention_gate"] else ("sigmoid", "silu"), "sigmoid")
    for ours, theirs in (("output_norm", "output_norm"), ("key_shift", "k_shift"), ("value_shift", "v_shift")):
        fields[ours] = values.get(f"use_{theirs}", bool, False)
    return gates, FOX


def _take(config: SbevalConfig, gates: str, model_type: str, weights: Weights) -> dict[str, Tensor]:
    names, fox = fla_names(config), model_type in _FOX_TYPES
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    split_rows: dict[str, Tensor] = {}
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.attn"
        for letter, kind, shifts in (("k", "key", config.key_shift), ("v", "value", config.value_shift)):
            if shifts:
                _, shape = names[f"{ours}.{letter}_proj.weight"]
                names[f"{ours}.{letter}_proj.weight"] = (f"{theirs}.{letter}_proj.linear.weight", shape)
                shift_shape = (config.num_key_value_heads, width)
                names[f"{ours}.{kind}_shift.weight"] = (f"{theirs}.{letter}_proj.shift_proj.weight", shift_shape)
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
            # gate and up projection are one matrix, with the rows of the gate first
            mlp = f"model.layers.{layer}.mlp"
            both = weights.take(f"{mlp}.gate_proj.weight", (2 * inner, width))
            del names[f"{mlp}.gate_proj.weight"], names[f"{mlp}.up_proj.weight"]
            split_rows |= dict(zip((f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"), both.chunk(2), strict=True))
    tensors = split_rows | {name: weights.take(theirs, shape) for name, (theirs, shape) in names.items()}
    per_head: tuple[str, ...] = ("output_norm.weight",)
    if config.qk_norm_per_head:
        per_head += ("q_norm.weight", "k_norm.weight")
    tensors = {name: x.view(-1, config.head_dim) if name.endswith(per_head) else x for name, x in tensors.items()}
    for layer in range(config.num_hidden_layers):
        ours = f"model.layers.{layer}.self_attn"
        if gates in ("bias_only", "fixed"):  # gates that do not depend on the input
            tensors[f"{ours}.forget_gate.weight"] = torch.zeros(heads, width)
        if config.attention_gate and "qkv" in config.bias:
            tensors[f"{ours}.head_gate.bias"] = torch.zeros(width)
    return tensors
