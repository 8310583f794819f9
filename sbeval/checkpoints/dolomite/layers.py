"""Reads the layers of a dolomite-engine configuration, from flat keys or from a list of blocks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sbeval.checkpoints.ignored import DOLOMITE_BLOCK
from sbeval.checkpoints.values import ConfigValues
from sbeval.errors import UserError, brief

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
# values of lm-engine's attention_multiplier_method, and the power of head_dim that scales the logits
_SCALE_EXPONENTS = {"1 / sqrt(head_dim)": -0.5, "1 / head_dim": -1.0}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DolomiteMixer:
    """Attention of one layer; `SbevalConfig` describes further attributes.

    Attributes:
        kind: "stickbreaking" or "softmax".
        attention_multiplier: factor of the logits; None means head_dim ** -0.5.
        sliding_window: number of keys that a query sees, including its own; None means all.
        exclusive_self_attention: whether the projection on the position's own value is subtracted from the output.
        attention_gate: whether `c_attn` has further rows, which compute a gate for each head.
        qkv_bias: whether `c_attn` has a bias; None if no key says so.
        output_bias: whether `c_proj` has a bias; None if no key says so.
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
    """MLP or mixture of experts of one layer; `SbevalConfig` describes further attributes.

    Attributes:
        interleaved: whether the rows of gate and up projection alternate in `c_fc`, gate first. Otherwise all rows of
            the up projection come first.
        shared_intermediate_size: hidden width of the shared expert, None without one.
        shared_interleaved: as `interleaved`, for the shared expert.
        shared_expert_gating: whether the shared expert's output is multiplied by a gate for each token.
        normalize_expert_weights: whether the weights of the chosen experts sum to 1.
        balanced_experts: whether a bias is added to the probabilities for choosing experts, but not to their weights.
        bias: whether the linear layers have a bias; None if no key says so.
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
    """Checks that a value is the same in all layers, and returns it.

    `values` is a list with one value for each layer, or a mapping from layers to values; `what` names it in the error.

    Raises:
        UserError: a layer differs from the first.
    """
    (first, expected), *further = values.items() if isinstance(values, Mapping) else enumerate(values)
    for layer, value in further:
        if value != expected:
            raise UserError(
                f"{what} must be the same in all layers, but is {brief(expected)} in layer {first} and {brief(value)} "
                f"in layer {layer}; such models are not supported"
            )
    return expected


def flat_layer(config: ConfigValues, model_type: str) -> tuple[DolomiteMixer, DolomiteMLP]:
    """Reads a flat configuration, in which all layers are the same."""
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
    """Reads each layer of a configuration with lists of blocks.

    `interleaved` says whether gate and up rows of an MLP alternate if its block has no key for that.

    Raises:
        UserError: the type of a block is not supported, or it has an unknown key.
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
            f"sequence_mixer_type {brief(kind)} of layer {layer} is not supported; supported: {', '.join(_MIXERS)}"
        )
    heads = block.count("num_attention_heads", default=default_heads)
    bias = block.get("add_bias", bool, None)
    fields: dict[str, Any] = {
        "kind": _MIXERS[kind],
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(block, heads),
        "head_dim": _head_dim(None, hidden_size, heads),
        "attention_multiplier": block.get("attention_multiplier", float, None),
        "output_bias": bias,
        "qkv_bias": bias,
    }
    if kind == "softmax_attention":
        fields["head_dim"] = _head_dim(block.count("head_dim", default=None), hidden_size, heads)
        fields["attention_multiplier"] = _multiplier(block, layer, fields["attention_multiplier"], fields["head_dim"])
        # lm-engine counts the keys to the left of a query, without the key at its position
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
            f"attention_multiplier_method of layer {layer} must be one of {', '.join(_SCALE_EXPONENTS)} without an "
            f"attention_multiplier, or null with one; found {brief(method)} with {brief(number)}; correct the "
            "configuration"
        )
    return number if method is None else float(head_dim ** _SCALE_EXPONENTS[method])


def _mlp(block: ConfigValues, layer: int, hidden_size: int, interleaved: bool) -> DolomiteMLP:
    kind = block.get("mlp_type", str, "MLP")
    if kind not in ("MLP", "MoE"):
        raise UserError(f"mlp_type {brief(kind)} of layer {layer} is not supported; supported: MLP, MoE")
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


def _head_dim(head_dim: int | None, hidden_size: int, heads: int) -> int:
    if head_dim is None and hidden_size % heads:
        raise UserError(f"hidden_size {hidden_size} must be a multiple of {heads} heads; correct the configuration")
    return head_dim or hidden_size // heads


def _key_value_heads(config: ConfigValues, heads: int) -> int:
    stated = config.count("num_key_value_heads", default=None)
    kind = config.one_of("attention_head_type", _HEAD_TYPES, "gqa" if stated else "mqa")
    expected = {"mha": heads, "mqa": 1}.get(kind, stated)
    if expected is None:
        raise UserError("attention_head_type gqa needs num_key_value_heads in the configuration")
    if stated not in (None, expected):
        raise UserError(
            f"num_key_value_heads must be {expected} with attention_head_type {kind} and {heads} heads, found "
            f"{stated}; correct the configuration"
        )
    if heads % expected:
        raise UserError(
            f"the number of heads must be a multiple of num_key_value_heads, found {heads} and {expected}; correct the "
            "configuration"
        )
    return int(expected)
