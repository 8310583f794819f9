"""Reads the stick-breaking models of `Lanni-ni/forgetting-transformer`, a fork of the Forgetting Transformer's code.

Their model type, "stickbreaking", is also one of dolomite-engine's. The names of their tensors tell them apart.

The fork's code reads some keys and does not compute what they say. This reader follows the code, since the weights were
trained with it:

- `normalize_attention` has no effect: the operation returns unnormalised weights, as all stick-breaking models do.
- `use_k_shift`, `use_v_shift` and `window_size` have no effect.
- `use_rope` rotates every head by the head's index, not every position by its place in the text, because its rotary
  module takes the second dimension for the length. The rotation is the same at all positions, so it goes into the
  weights. Without norms and with a key head for each query head it cancels.
- With `qk_norm`, one RMSNorm spans all heads, unless `qk_norm_share_param_across_head` is set.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sbeval.checkpoints.files import Weights
from sbeval.checkpoints.fla import fla_names, shared_fields
from sbeval.checkpoints.ignored import FOX_STICKBREAKING
from sbeval.checkpoints.values import ConfigValues
from sbeval.models import SbevalConfig
from sbeval.models.rope import rope_frequencies

MODEL_TYPE = "stickbreaking"
FORMAT = "fox:stickbreaking"
_EMBEDDING = "model.embeddings.weight"
_SIZES = {"vocab_size": 50277, "hidden_size": 768, "num_hidden_layers": 12, "num_heads": 12}


def is_fox_stickbreaking(source: Mapping[str, Any], weights: Weights) -> bool:
    """Whether a checkpoint's model type and tensor names are those of the fork's stick-breaking models."""
    return source.get("model_type") == MODEL_TYPE and _EMBEDDING in weights


def keys_without_effect(source: Mapping[str, Any]) -> list[str]:
    """Returns the keys of config.json that ask for something that the fork's code does not compute."""
    names = ("normalize_attention", "use_k_shift", "use_v_shift", "window_size", "use_rope")
    return [name for name in names if source.get(name)]


def read_fox_stickbreaking(source: Mapping[str, Any], weights: Weights) -> tuple[str, SbevalConfig, dict[str, Tensor]]:
    """Reads the configuration and the tensors.

    Returns:
        The name of the format, the configuration, and the state dict of `SbevalForCausalLM`.

    Raises:
        UserError: a feature is not supported, or a tensor is missing, has a wrong shape or is unknown.
    """
    values = ConfigValues(source)
    values.get("model_type", str, MODEL_TYPE)
    values.one_of("hidden_act", ("swish", "silu"), "swish")
    fields = shared_fields(values, _SIZES)
    fields["attention"] = "stickbreaking"
    fields["attend_current"] = values.get("attend_current", bool, False)
    fields["intermediate_size"] = weights.shape("model.layers.0.mlp.gate_proj.weight")[0]
    fields["bias"] = ["qkv"] if values.get("attention_bias", bool, False) else []
    fields["qk_norm"] = values.get("qk_norm", bool, False)
    shares_norm = values.get("qk_norm_share_param_across_head", bool, False)
    fields["qk_norm_over_heads"] = fields["qk_norm"] and not shares_norm
    rotates = values.get("use_rope", bool, False)
    theta = values.get("rope_base", float, 500000.0)
    config = SbevalConfig(**fields)
    values.refuse_unread(FOX_STICKBREAKING, whole=True)
    tensors = {name: weights.take(theirs, shape) for name, (theirs, shape) in fla_names(config).items()}
    if config.qk_norm_over_heads:
        for name in [name for name in tensors if name.endswith(("q_norm.weight", "k_norm.weight"))]:
            tensors[name] = tensors[name].view(-1, config.head_dim)
    if rotates and (config.qk_norm or config.num_key_value_heads != config.num_attention_heads):
        for name in [name for name in tensors if ".q_proj." in name or ".k_proj." in name]:
            tensors[name] = rotated_by_head(tensors[name], config.head_dim, theta)
    if config.tie_word_embeddings:
        weights.check_tied_head(tensors["model.embed_tokens.weight"])
    weights.refuse_left_over(FORMAT)
    return FORMAT, config, tensors


def rotated_by_head(rows: Tensor, head_dim: int, theta: float) -> Tensor:
    """Rotates the rows of each head by its index, as RoPE with base `theta` rotates a position.

    `rows` is the weight [heads * head_dim, hidden_size] or bias [heads * head_dim] of a projection.
    """
    rope = {"rope_type": "default", "rope_theta": theta}
    frequencies = rope_frequencies(rope, head_dim=head_dim, original_length_tokens=1, length_tokens=1)
    of_heads = rows.double().view(len(rows) // head_dim, head_dim, -1)
    index = torch.arange(len(of_heads), dtype=torch.float64, device=rows.device)
    angle = index[:, None] * frequencies.inv_freq.to(index)
    cos, sin = angle.cos()[..., None], angle.sin()[..., None]
    first, second = of_heads.chunk(2, dim=1)
    turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=1)
    return turned.view(rows.shape).to(rows.dtype)
