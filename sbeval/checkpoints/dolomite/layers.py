"""What a dolomite-engine configuration says of each layer, flat or in a list of blocks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sbeval.checkpoints.ignored import DOLOMITE_BLOCK
from sbeval.checkpoints.values import ConfigValues
from sbeval.errors import UserError, shown

T = TypeVar("T")
STICKBREAKING_FLAT_TYPES = ("stickbreaking", "sb_dolomite", "moe_stickbreaking")
MIXTURE_FLAT_TYPES = ("moe_stickbreaking", "moe_dolomite")
_HEAD_TYPES = ("mha", "mqa", "gqa")
_MIXERS = {"softmax_attention": "softmax", "stickbreaking_attention": "stickbreaking"}
_ACTIVATIONS = {
    "swiglu": "swiglu",
    "geglu": "geglu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
# lm-engine's way to scale logits, by the name it gives it: the exponent of the head's width
_SCALE_EXPONENTS = {"1 / sqrt(head_dim)": -0.5, "1 / head_dim": -1.0}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DolomiteMixer:
    """Attention of a layer.

    Attributes:
        kind: "stickbreaking" or "softmax".
        attention_multiplier: factor of the logits; None means head_dim ** -0.5.
        sliding_window: keys a query sees, itself included; None means all.
        exclusive_self_attention: its output has no part along the position's own value.
        attention_gate: rows of `c_attn` beyond queries, keys and values gate the heads.
        qkv_bias: whether `c_attn` has a bias; None where no key says.
        output_bias: the same of `c_proj`.
    """

    kind: str
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_multiplier: float | None
    sliding_window: int | None = None
    exclusive_self_attention: bool = False
    attention_gate: bool = False
    qkv_bias: bool | None = None
    output_bias: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DolomiteMLP:
    """MLP of a layer, or mixture of MLPs.

    Attributes:
        interleaved: gate and up alternate in the rows of `c_fc`, gate first; else up comes before gate.
        shared_intermediate_size: of an MLP for every token beside the experts, None without.
        shared_interleaved: `interleaved`, of that one.
        shared_expert_gating: whether that one's output is gated for each token.
        normalize_expert_weights: whether the weights of chosen experts add up to 1.
        balanced_experts: experts are chosen by their probabilities and a bias, which is no part of their weights.
        bias: whether its maps have one; None where no key says.
    """

    intermediate_size: int
    activation: str
    interleaved: bool = False
    num_experts: int | None = None
    num_experts_per_token: int | None = None
    shared_intermediate_size: int | None = None
    shared_interleaved: bool = False
    shared_expert_gating: bool = False
    normalize_expert_weights: bool = True
    balanced_experts: bool = False
    bias: bool | None = None


def same_in_all_layers(values: Sequence[T] | Mapping[int, T], what: str) -> T:
    """Returns the value that all layers share, or all those of a mapping from layers.

    Raises:
        UserError: a layer differs from the first.
    """
    (first, expected), *others = values.items() if isinstance(values, Mapping) else enumerate(values)
    for layer, value in others:
        if value != expected:
            raise UserError(
                f"layers that differ in this are not supported: {what} is {shown(expected)} in layer {first}, "
                f"{shown(value)} in layer {layer}"
            )
    return expected


def flat_layer(config: ConfigValues, model_type: str) -> tuple[DolomiteMixer, DolomiteMLP]:
    """Returns what a flat configuration says of all layers."""
    heads = config.count("n_head", "num_attention_heads", default=12)
    hidden_size = config.count("n_embd", "hidden_size", default=768)
    multiplier = config.get("attention_multiplier", float, None)
    bias = config.get("add_bias", bool, None)
    qkv_bias = config.get("add_qkv_bias", bool, False)
    if not config.get("scale_attn_weights", bool, True):
        multiplier = 1.0
    mixer = DolomiteMixer(
        kind="stickbreaking" if model_type in STICKBREAKING_FLAT_TYPES else "softmax",
        num_attention_heads=heads,
        num_key_value_heads=_key_value_heads(config, heads),
        head_dim=_head_dim(None, hidden_size, heads),
        attention_multiplier=multiplier,
        qkv_bias=qkv_bias or bias,
        output_bias=bias,
    )
    experts = model_type in MIXTURE_FLAT_TYPES
    mlp = DolomiteMLP(
        intermediate_size=config.count("n_inner", default=None) or 4 * hidden_size,
        activation=_ACTIVATIONS[config.one_of("activation_function", tuple(_ACTIVATIONS), "gelu_pytorch_tanh")],
        num_experts=config.count("num_experts", default=8) if experts else None,
        num_experts_per_token=config.count("num_experts_per_tok", default=2) if experts else None,
        shared_intermediate_size=config.count("shared_n_inner", default=None) if experts else None,
        balanced_experts=experts and config.get("use_aux_free_moe", bool, False),
        bias=bias,
    )
    return mixer, mlp


def block_layers(config: ConfigValues, *, interleaved: bool) -> list[tuple[DolomiteMixer, DolomiteMLP]]:
    """Returns what a configuration with lists of blocks says of each layer.

    Gated MLPs alternate their rows as `interleaved` says where no key does.

    Raises:
        UserError: a block is of a kind that is not supported, or holds a key that is not known.
    """
    mixers, mlps = config.parts("sequence_mixer_blocks"), config.parts("mlp_blocks")
    layers = config.count("num_layers", default=12)
    mlps = mlps or [ConfigValues({}, f"mlp_blocks[{layer}]") for layer in range(len(mixers))]
    if not len(mixers) == len(mlps) == layers:
        raise UserError(
            f"num_layers is {layers}, but the configuration lists {len(mixers)} sequence mixers and {len(mlps)} MLPs"
        )
    hidden_size = config.count("hidden_size", default=768)
    heads = config.count("num_attention_heads", default=12)
    return [
        (_mixer(mixer, layer, hidden_size, heads), _mlp(mlp, layer, hidden_size, interleaved))
        for layer, (mixer, mlp) in enumerate(zip(mixers, mlps, strict=True))
    ]


def _mixer(block: ConfigValues, layer: int, hidden_size: int, default_heads: int) -> DolomiteMixer:
    kind = block.get("sequence_mixer_type", str, "softmax_attention")
    if kind not in _MIXERS:
        raise UserError(
            f"sequence_mixer_type {shown(kind)} of layer {layer} is not supported; supported: {', '.join(_MIXERS)}"
        )
    heads = block.count("num_attention_heads", default=default_heads)
    fields: dict[str, Any] = {
        "kind": _MIXERS[kind],
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(block, heads),
        "head_dim": _head_dim(None, hidden_size, heads),
        "attention_multiplier": block.get("attention_multiplier", float, None),
        "output_bias": (bias := block.get("add_bias", bool, None)),
        "qkv_bias": bias,
    }
    if kind == "softmax_attention":
        fields["head_dim"] = _head_dim(block.count("head_dim", default=None), hidden_size, heads)
        fields["attention_multiplier"] = _multiplier(block, layer, fields["attention_multiplier"], fields["head_dim"])
        # its kernels count the keys to the left of a query, which also sees itself
        window = block.count("sliding_window", default=None)
        fields["sliding_window"] = None if window is None else window + 1
        fields["exclusive_self_attention"] = block.get("exclusive_self_attention", bool, False)
        fields["attention_gate"] = block.get("attention_gate", bool, False)
        stated = block.get("qkv_bias", bool, None)
        fields["qkv_bias"] = bias if stated is None else stated
    block.refuse_unread(DOLOMITE_BLOCK)
    return DolomiteMixer(**fields)


def _multiplier(block: ConfigValues, layer: int, number: float | None, head_dim: int) -> float | None:
    if "attention_multiplier_method" not in block:
        return number
    method = block.get("attention_multiplier_method", str, None)
    if (method is None) == (number is None) or (method is not None and method not in _SCALE_EXPONENTS):
        raise UserError(
            f"Expected attention_multiplier_method of layer {layer} to be one of {', '.join(_SCALE_EXPONENTS)} without "
            f"an attention_multiplier, or null with one, found {shown(method)} with {shown(number)}; mend the "
            "configuration"
        )
    return number if method is None else float(head_dim ** _SCALE_EXPONENTS[method])


def _mlp(block: ConfigValues, layer: int, hidden_size: int, interleaved: bool) -> DolomiteMLP:
    kind = block.get("mlp_type", str, "MLP")
    if kind not in ("MLP", "MoE"):
        raise UserError(f"mlp_type {shown(kind)} of layer {layer} is not supported; supported: MLP, MoE")
    fields: dict[str, Any] = {}
    if kind == "MoE":
        fields = {
            "num_experts": block.count("num_experts", default=8),
            "num_experts_per_token": block.count("num_experts_per_tok", default=2),
            "shared_intermediate_size": block.count("shared_intermediate_size", default=None),
            "shared_interleaved": block.get("use_interleaved_weights_for_shared_experts", bool, interleaved),
            "shared_expert_gating": block.get("shared_expert_gating", bool, False),
            "normalize_expert_weights": block.get("normalized_topk", bool, True),
        }
    mlp = DolomiteMLP(
        intermediate_size=block.count("intermediate_size", default=4 * hidden_size),
        activation=_ACTIVATIONS[block.one_of("activation_function", tuple(_ACTIVATIONS), "gelu_pytorch_tanh")],
        interleaved=block.get("use_interleaved_weights", bool, interleaved),
        bias=block.get("add_bias", bool, None),
        **fields,
    )
    block.refuse_unread(DOLOMITE_BLOCK)
    return mlp


def _head_dim(given: int | None, hidden_size: int, heads: int) -> int:
    if given is None and hidden_size % heads:
        raise UserError(f"a width of {hidden_size} is no multiple of {heads} heads; mend the configuration")
    return given or hidden_size // heads


def _key_value_heads(config: ConfigValues, heads: int) -> int:
    stated = config.count("num_key_value_heads", default=None)
    kind = config.one_of("attention_head_type", _HEAD_TYPES, "gqa" if stated else "mqa")
    expected = {"mha": heads, "mqa": 1}.get(kind, stated)
    if expected is None:
        raise UserError("attention_head_type gqa needs num_key_value_heads in the configuration")
    if stated not in (None, expected):
        raise UserError(
            f"Expected num_key_value_heads {expected} with attention_head_type {kind} and {heads} heads, found "
            f"{stated}; mend the configuration"
        )
    if heads % expected:
        raise UserError(f"Expected heads that are a multiple of num_key_value_heads, found {heads} and {expected}")
    return int(expected)
