"""Sizes of a decoder of any kind: channels, heads, layers, experts, and what its weights hold."""

import dataclasses
from typing import Any

from transformers import PreTrainedModel

from sbeval.checkpoints.facts import text_config
from sbeval.models.forgetting.layer import cached_channels
from sbeval.models.mlp import MOST_TOKENS

_NO_KEYS_KEPT = ("linear_attention", "mamba", "recurrent", "conv")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a decoder, in channels, heads and layers.

    Attributes:
        cached_channels: numbers that a key head keeps of a position, None for its key and value alone.
        inner_size: channels inside the MLP that every token passes, 0 where there are experts alone.
        expert_size: channels inside an expert, 0 without experts.
        chosen_experts: how many a token passes.
        tokens_of_experts_at_once: most tokens that stand before experts at one time, None for all.
        gated: whether an MLP has a gate beside its channels.
        key_windows: for each layer that keeps keys the most of them it keeps, None for all.
        parameters: numbers in all weights, those shared by embedding and head once.
        other_embedding_parameters: of them, those of an embedding that is not the head too.
        idle_parameters: of them, those of experts that a token does not pass.
        weight_bytes: what they take.
        item_bytes: what one number of the residual stream takes.
    """

    hidden_size: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    cached_channels: int | None
    inner_size: int
    expert_size: int
    chosen_experts: int
    tokens_of_experts_at_once: int | None
    gated: bool
    vocabulary: int
    key_windows: tuple[int | None, ...]
    parameters: int
    other_embedding_parameters: int
    idle_parameters: int
    weight_bytes: int
    item_bytes: int


def sizes_of(model: PreTrainedModel) -> Sizes | None:
    """Returns the sizes of a model, None where its configuration names them otherwise than other models do."""
    config: Any = text_config(model.config)
    parameters = dict(model.named_parameters())
    heads, layers = (_whole(config, name) for name in ("num_attention_heads", "num_hidden_layers"))
    hidden_size = _whole(config, "hidden_size")
    if not (heads and layers and hidden_size):
        return None
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embeddings: Any = model.get_input_embeddings()
    head_weight, embedding = getattr(output, "weight", None), getattr(embeddings, "weight", None)
    tied = head_weight is embedding
    experts, chosen, expert_size, inner_size = experts_of(config, hidden_size)
    idle = sum(one.numel() for one in parameters.values() if one.dim() == 3 and len(one) == experts)
    return Sizes(
        hidden_size=hidden_size,
        layers=layers,
        # ModuleFormer's chosen experts have query heads of their own, which share its keys
        heads=heads * (_whole(config, "attention_chosen") or 1),
        key_value_heads=_whole(config, "num_key_value_heads") or heads,
        head_dim=_whole(config, "head_dim") or hidden_size // heads,
        cached_channels=cached_channels(config, model.dtype) if config.model_type == "sbeval" else None,
        inner_size=inner_size,
        expert_size=expert_size,
        chosen_experts=chosen,
        tokens_of_experts_at_once=MOST_TOKENS if config.model_type == "sbeval" else None,
        gated=any("gate_proj" in name or "gate_up" in name for name in parameters),
        vocabulary=_whole(config, "vocab_size") or 0,
        key_windows=_key_windows(config, layers),
        parameters=sum(parameter.numel() for parameter in parameters.values()),
        other_embedding_parameters=0 if tied or embedding is None else embedding.numel(),
        idle_parameters=0 if not experts else idle * (experts - chosen) // experts,
        weight_bytes=sum(parameter.numel() * parameter.itemsize for parameter in parameters.values()),
        item_bytes=model.dtype.itemsize,
    )


def experts_of(config: Any, hidden_size: int = 0) -> tuple[int, int, int, int]:
    """Returns experts, those chosen for a token, channels in each, and channels of an MLP that every token passes."""
    if width := _whole(config, "mlp_width"):  # ModuleFormer
        return config.mlp_experts, config.mlp_chosen, width, 0
    dense = _first(config, "intermediate_size", "n_inner") or 4 * hidden_size
    layers = [config, *(getattr(config, "layer_overrides", None) or [])]
    layers = [vars(one) if not isinstance(one, dict) else one for one in layers]
    chosen = max(one.get(name) or 0 for one in layers for name in ("num_experts_per_token", "num_experts_per_tok"))
    experts = max(
        one.get(name) or 0 for one in layers for name in ("num_experts", "num_local_experts", "n_routed_experts")
    )
    if not (experts and chosen):
        return 0, 0, 0, dense
    of_expert = _first(config, "moe_intermediate_size", "expert_intermediate_size") or dense
    return experts, chosen, of_expert, _first(config, "shared_intermediate_size") or 0


def _first(config: Any, *names: str) -> int | None:
    return next((value for name in names if (value := _whole(config, name))), None)


def _key_windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = _whole(config, "sliding_window") if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    return tuple(
        window if "sliding" in kind else None for kind in kinds if not any(part in kind for part in _NO_KEYS_KEPT)
    )


def _whole(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
