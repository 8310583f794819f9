"""What a dolomite-engine configuration says, for every generation, with dolomite's defaults for absent keys."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from sbeval.checkpoints.layers import same_in_all_layers
from sbeval.errors import UserError

FLAT_TYPES = ("stickbreaking", "sb_dolomite")
BLOCK_TYPES = ("gpt_dolomite", "gpt_base")
_ACTIVATIONS = {
    "swiglu": "swiglu",
    "geglu": "geglu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
_MIXERS = {"softmax_attention": "softmax", "stickbreaking_attention": "stickbreaking"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DolomiteConfig:
    """The facts of a dense dolomite model, in this family's terms.

    Attributes:
        blocks: whether the configuration lists its blocks (generation C) or is flat (A, and its softmax models).
        mixer: "stickbreaking" or "softmax".
        positions: "rope", "nope", "alibi" or "learned_absolute".
        has_remainder: whether the remainder adds to the output.
        unscaled: attention logits are not scaled at all.
    """

    model_type: str
    blocks: bool
    mixer: str
    positions: str
    has_remainder: bool
    unscaled: bool
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate_size: int
    activation: str
    norm: str
    norm_eps: float
    attention_multiplier: float | None
    embedding_multiplier: float | None
    residual_multiplier: float | None
    logits_divisor: float | None
    tied: bool
    max_positions: int
    rope_parameters: dict[str, Any] | None
    token_ids: dict[str, Any]


def read_dolomite_config(config: Mapping[str, Any]) -> DolomiteConfig:
    """Reads any generation's `config.json`.

    Raises:
        UserError: a part is not supported; the message names the layer and the part.
    """
    if "attention_blocks" in config:
        raise UserError("dolomite configurations with attention_blocks, between generations A and C, are not supported")
    blocks = "sequence_mixer_blocks" in config
    shared = _blocks(config) if blocks else _flat(config)
    activation = shared["activation"]
    if activation not in _ACTIVATIONS:
        raise UserError(
            f"activation_function {activation!r} of the MLP in layer 0 is not supported; "
            f"supported are {', '.join(_ACTIVATIONS)}"
        )
    norm = config.get("normalization_function", "layernorm")
    if norm not in ("layernorm", "rmsnorm"):
        raise UserError(f"normalization_function {norm!r} is not supported; supported are layernorm and rmsnorm")
    positions = config.get("position_embedding_type", "learned_absolute")
    hidden_size = shared.pop("hidden_size")
    rotated = config.get("rope_dim")
    if positions == "rope" and shared["mixer"] == "softmax" and rotated not in (None, hidden_size // shared["heads"]):
        raise UserError(
            f"rope_dim {rotated} of a softmax model is not supported: its heads have {hidden_size // shared['heads']} "
            "dimensions, and all of them are rotated here"
        )
    return DolomiteConfig(
        model_type=str(config["model_type"]),
        blocks=blocks,
        positions=positions,
        has_remainder=blocks or bool(config.get("sb_remainder", True)),
        unscaled=not blocks and config.get("scale_attn_weights", True) is False,
        vocab_size=config.get("vocab_size", 50304),
        hidden_size=hidden_size,
        norm=norm,
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        embedding_multiplier=config.get("m_emb"),
        residual_multiplier=config.get("m_residual"),
        logits_divisor=config.get("m_width"),
        tied=config.get("tie_word_embeddings", True),
        rope_parameters=_rope(config) if positions == "rope" else None,
        token_ids={name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **{**shared, "activation": _ACTIVATIONS[activation]},
    )


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config.get("n_head", config.get("num_attention_heads", 12))
    hidden_size = config.get("n_embd", config.get("hidden_size", 768))
    kind = config.get("attention_head_type", "mqa")
    key_value_heads = config.get("num_key_value_heads")
    if key_value_heads is None:
        if kind == "gqa":
            raise UserError("attention_head_type gqa needs num_key_value_heads in the configuration")
        key_value_heads = heads if kind == "mha" else 1
    return {
        "mixer": "stickbreaking" if config["model_type"] in FLAT_TYPES else "softmax",
        "hidden_size": hidden_size,
        "layers": config.get("n_layer", config.get("num_layers", 12)),
        "heads": heads,
        "key_value_heads": key_value_heads,
        "intermediate_size": config.get("n_inner") or 4 * hidden_size,
        "activation": config.get("activation_function", "gelu_pytorch_tanh"),
        "attention_multiplier": config.get("attention_multiplier"),
        "max_positions": config.get("n_positions", config.get("max_position_embeddings", 1024)),
    }


def _blocks(config: Mapping[str, Any]) -> dict[str, Any]:
    mixers: list[Mapping[str, Any]] = config["sequence_mixer_blocks"]
    mlps: list[Mapping[str, Any]] = config.get("mlp_blocks") or [{} for _ in mixers]
    layers = config.get("num_layers", 12)
    if not len(mixers) == len(mlps) == layers:
        raise UserError(
            f"num_layers is {layers}, but the configuration lists {len(mixers)} sequence mixers and {len(mlps)} MLPs"
        )
    for layer, (mixer, mlp) in enumerate(zip(mixers, mlps, strict=True)):
        kind = mixer.get("sequence_mixer_type", "softmax_attention")
        if kind not in _MIXERS:
            raise UserError(f"sequence_mixer_type {kind!r} of layer {layer} is not supported")
        if mlp.get("mlp_type", "MLP") != "MLP":
            raise UserError(f"mlp_type {mlp['mlp_type']!r} of layer {layer} is not supported: dense MLPs only")
        if mixer.get("sliding_window") is not None:
            raise UserError(f"sliding_window of layer {layer} is not supported")
        if mlp.get("use_interleaved_weights"):
            raise UserError(f"use_interleaved_weights of layer {layer} is not supported")
    hidden_size = config.get("hidden_size", 768)

    def shared(blocks: list[Mapping[str, Any]], name: str, default: Any) -> Any:
        return same_in_all_layers([block.get(name, default) for block in blocks], name)

    kinds = [_MIXERS[mixer.get("sequence_mixer_type", "softmax_attention")] for mixer in mixers]
    return {
        "mixer": same_in_all_layers(kinds, "sequence_mixer_type"),
        "hidden_size": hidden_size,
        "layers": layers,
        "heads": shared(mixers, "num_attention_heads", config.get("num_attention_heads", 12)),
        "key_value_heads": shared(mixers, "num_key_value_heads", 1),
        "intermediate_size": shared(mlps, "intermediate_size", None) or 4 * hidden_size,
        "activation": shared(mlps, "activation_function", "gelu_pytorch_tanh"),
        "attention_multiplier": shared(mixers, "attention_multiplier", None),
        "max_positions": config.get("max_position_embeddings", 1024),
    }


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    theta = float(config.get("rope_theta", 10000))
    # transformers' newer form holds both in one object, which is also written where nothing is scaled
    scaling = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = float(scaling.pop("rope_theta", theta))
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None)
    if kind == "default" or not scaling:
        return {"rope_type": "default", "rope_theta": theta}
    scaling.pop("type", None)
    return {**scaling, "rope_type": "yarn", "rope_theta": theta}
