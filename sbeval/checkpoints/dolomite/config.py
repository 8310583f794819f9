"""Reads config.json of dolomite-engine and lm-engine, with their defaults for absent keys."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from sbeval.checkpoints import ignored
from sbeval.checkpoints.dolomite.layers import (
    MIXTURE_FLAT_TYPES,
    STICKBREAKING_FLAT_TYPES,
    DolomiteMixer,
    DolomiteMLP,
    block_layers,
    flat_layer,
    same_in_all_layers,
)
from sbeval.checkpoints.values import ConfigValues
from sbeval.errors import UserError

FLAT_TYPES = (*STICKBREAKING_FLAT_TYPES, "moe_dolomite")
BLOCK_TYPES = ("gpt_dolomite", "gpt_base")
_POSITIONS = ("rope", "nope", "alibi", "learned_absolute")
# No key says any more whether the rows of gate and up projection alternate. Configurations have these keys since
# 2026-03-26, three months before lm-engine began to alternate them in all gated MLPs; before that, a key said so.
_INTERLEAVED_SINCE = ("embedding_init_method", "use_depth_scaled_init")
# fields that must be the same in all layers, and their names in error messages
_MIXER_FIELDS = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_multiplier", "sliding_window"),
    *("exclusive_self_attention", "attention_gate"),
)
_MIXTURE_FIELDS = ("shared_expert_gating", "normalize_expert_weights", "balanced_experts")
_KEY_NAMES = {
    "sliding_window": "sliding_window, counting the query itself,",
    "activation": "activation_function",
    "normalize_expert_weights": "normalized_topk",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DolomiteConfig:
    """A dolomite configuration, in terms of `SbevalConfig`.

    Attributes:
        model_type: `model_type` of config.json.
        blocks: whether the configuration has a list of blocks (generation C) or is flat (generation A, and softmax
            models of its time).
        positions: "rope", "nope", "alibi" or "learned_absolute".
        has_remainder: whether the output of stick-breaking layers has a term for the remainder, the attention weight
            that no key received.
        has_head_norm: whether stick-breaking layers have a norm for each head; None if only the tensors show it.
        mixers: attention of each layer.
        mlps: MLP of each layer.
        fields: further fields of `SbevalConfig`.
    """

    model_type: str
    blocks: bool
    positions: str
    has_remainder: bool
    has_head_norm: bool | None
    mixers: list[DolomiteMixer]
    mlps: list[DolomiteMLP]
    fields: dict[str, Any]


def read_dolomite_config(source: Mapping[str, Any]) -> DolomiteConfig:
    """Reads config.json of any generation.

    Raises:
        UserError: a feature is not supported, a key is unknown, or a value has the wrong type.
    """
    if "attention_blocks" in source:
        raise UserError(
            "config.json has attention_blocks, a form between dolomite-engine's generations A and C that is not "
            "supported"
        )
    config = ConfigValues(source)
    model_type = config.get("model_type", str, "")
    if model_type in FLAT_TYPES and "n_embd" not in config and "num_hidden_layers" in config:
        raise UserError(
            f"model_type {model_type!r} is a model type of dolomite-engine, but this configuration has other keys "
            "(hidden_size and num_hidden_layers instead of n_embd and n_layer): it is another architecture with the "
            "same name, which is not supported"
        )
    blocks = "sequence_mixer_blocks" in config
    if blocks:
        interleaved = model_type == "gpt_base" and any(key in config for key in _INTERLEAVED_SINCE)
        layers = block_layers(config, interleaved=interleaved)
        unread = ignored.DOLOMITE_BLOCKS
        max_positions = config.count("max_position_embeddings", default=1024)
    else:
        layers = [flat_layer(config, model_type)] * config.count("n_layer", "num_layers", default=12)
        unread = ignored.DOLOMITE_FLAT | (ignored.DOLOMITE_FLAT_MIXTURE if model_type in MIXTURE_FLAT_TYPES else {})
        max_positions = config.count("n_positions", "max_position_embeddings", default=1024)
    mixers, mlps = [mixer for mixer, _ in layers], [mlp for _, mlp in layers]
    positions = config.one_of("position_embedding_type", _POSITIONS, "learned_absolute")
    if positions == "learned_absolute" and any(mixer.kind == "softmax" for mixer in mixers):
        raise UserError(
            "position_embedding_type learned_absolute is not supported for softmax layers; supported: rope, nope, alibi"
        )
    is_stickbreaking = any(mixer.kind == "stickbreaking" for mixer in mixers)
    rotates = positions == "rope" and any(mixer.kind == "softmax" for mixer in mixers)
    rope_parameters = _rope(config, mixers) if rotates else None
    fields = {
        "vocab_size": config.count("vocab_size", default=50304),
        "hidden_size": config.count("hidden_size" if blocks else "n_embd", "hidden_size", default=768),
        "num_hidden_layers": len(layers),
        "norm": config.one_of("normalization_function", ("layernorm", "rmsnorm"), "layernorm"),
        "norm_eps": config.get("layer_norm_epsilon", float, 1e-5),
        "embedding_multiplier": config.get("m_emb", float, None),
        "residual_multiplier": config.get("m_residual", float, None),
        "logits_divisor": config.get("m_width", float, None),
        "tie_word_embeddings": config.get("tie_word_embeddings", bool, True),
        "rope_parameters": rope_parameters,
        "training_length_tokens": (rope_parameters or {}).get("original_max_position_embeddings") or max_positions,
        "max_position_embeddings": max_positions,
        **{name: config.token(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    dolomite = DolomiteConfig(
        model_type=model_type,
        blocks=blocks,
        positions=positions,
        has_remainder=is_stickbreaking and (blocks or config.get("sb_remainder", bool, True)),
        has_head_norm=config.get("head_norm", bool, None) if is_stickbreaking and not blocks else None,
        mixers=mixers,
        mlps=mlps,
        fields=fields,
    )
    config.refuse_unread({**ignored.DOLOMITE_ROPE, **unread}, whole=True)
    return dolomite


def family_layers(source: DolomiteConfig, *, remainder: str, head_norm: bool) -> dict[str, Any]:
    """Returns the fields of `SbevalConfig` that describe layers, with `layer_overrides` if layers differ.

    `remainder` and `head_norm` apply to the stick-breaking layers.

    Raises:
        UserError: layers differ in a field that `layer_overrides` cannot set.
    """
    layers = []
    for mixer, mlp in zip(source.mixers, source.mlps, strict=True):
        stickbreaking = mixer.kind == "stickbreaking"
        layers.append(
            {
                "attention": "stickbreaking" if stickbreaking else source.positions,
                "remainder": remainder if stickbreaking else "none",
                "head_norm": stickbreaking and head_norm,
                "intermediate_size": mlp.intermediate_size,
                "num_experts": mlp.num_experts,
                "num_experts_per_token": mlp.num_experts_per_token,
                "shared_intermediate_size": mlp.shared_intermediate_size,
            }
        )
    # if any layer is stick-breaking, the model's main fields are those of such a layer
    usual = next((layer for layer in layers if layer["attention"] == "stickbreaking"), layers[0])
    overrides = [{name: value for name, value in layer.items() if value != usual[name]} for layer in layers]
    mixtures = [mlp for mlp in source.mlps if mlp.num_experts] or source.mlps
    shared = {
        name: same_in_all_layers([getattr(layer, name) for layer in compared], _KEY_NAMES.get(name, name))
        for compared, names in (
            (source.mixers, _MIXER_FIELDS),
            (source.mlps, ("activation",)),
            (mixtures, _MIXTURE_FIELDS),
        )
        for name in names
    }
    return usual | shared | {"layer_overrides": overrides if any(overrides) else None}


def _rope(config: ConfigValues, mixers: list[DolomiteMixer]) -> dict[str, Any]:
    head_dim = next(mixer.head_dim for mixer in mixers if mixer.kind == "softmax")
    if (rotated := config.count("rope_dim", default=None)) not in (None, head_dim):
        raise UserError(
            f"rope_dim {rotated} is not supported for a softmax model with head_dim {head_dim}: RoPE must rotate all "
            "dimensions of a head"
        )
    theta = config.get("rope_theta", float, 10000)
    # newer versions of transformers write base and scaling to one object, `rope_parameters`, even without scaling
    name = "rope_scaling" if config.get("rope_scaling", dict[str, Any], None) else "rope_parameters"
    values = config.part(name)
    config.get(name, dict[str, Any], None)
    theta = float(values.get("rope_theta", float, theta))
    kind = values.get("rope_type", str, None) or values.get("type", str, None)
    factor = values.get("factor", float, None)
    original = values.count("original_max_position_embeddings", default=None)
    values.refuse_unread(ignored.DOLOMITE_YARN)
    if kind in (None, "default") and factor is None:
        return {"rope_type": "default", "rope_theta": theta}
    if factor is None or original is None:
        raise UserError(
            f"{name} needs factor and original_max_position_embeddings, since dolomite-engine scales by YaRN whatever "
            f"the type; found {factor} and {original}; correct the configuration"
        )
    return {"rope_type": "yarn", "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}
