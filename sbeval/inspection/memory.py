"""Sizes of a decoder of any kind, and by them alone the memory of windows and generated texts, and what fits.

A window's largest moment is either inside a block, where the residual stream, its norm, the branch and their sum stand
beside the MLP's inner channels, or beside the logits of one chunk of targets. What was measured on a GPU stands in
`benchmarks/results/inspection.md`.
"""

import bisect
import dataclasses
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from sbeval.checkpoints.facts import text_config
from sbeval.errors import UserError
from sbeval.models.forgetting.layer import cached_channels
from sbeval.models.mlp import MOST_TOKENS
from sbeval.scoring.scorer import CHUNK_LOGITS

KEPT_FREE = 0.1
"""Share of the memory left for what the sizes do not tell: kernels' own memory, fragments, a CUDA context."""
BATCH_TOKENS = {"cpu": 8192, "cuda": 65536}
"""Most tokens of a batch, as the model adapter has them."""
_ROOM_MULTIPLE = 64
_MOST_TOKENS = 2**32
_NO_KEYS_KEPT = ("linear_attention", "mamba", "recurrent", "conv")
_UNITS = {"": 1, "B": 1} | {
    f"{unit}{end}": base**power
    for power, unit in enumerate("KMGT", 1)
    for end, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a decoder, in channels, heads and layers.

    Attributes:
        cached_channels: numbers that a key head keeps of a position, None for its key and value alone.
        inner_size: channels inside the MLP that every token passes, 0 where there are experts alone.
        expert_size: channels inside an expert, 0 without experts.
        tokens_of_experts_at_once: most tokens that stand before experts at one time, None for all.
        gated: whether an MLP has a gate beside its channels.
        key_windows: for each layer that keeps keys the most of them it keeps, None for all.
        parameters: numbers in all weights, those shared by embedding and head once.
        other_embedding_parameters: of all, those of an embedding that is not the head too.
        idle_parameters: of all, those of experts that a token does not pass.
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

    def __str__(self) -> str:
        heads = f"{self.heads} heads of {self.head_dim}"
        if self.key_value_heads != self.heads:
            heads += f", {self.key_value_heads} of keys"
        of_mlp = f"MLP of {self.inner_size:,}" if self.inner_size else ""
        of_experts = f"{self.chosen_experts} experts a token of {self.expert_size:,}" if self.chosen_experts else ""
        inner = " and ".join(filter(None, (of_mlp, of_experts)))
        gated = "gated " if self.gated else ""
        width = f"width {self.hidden_size:,}, vocabulary of {self.vocabulary:,}"
        return f"{self.layers} layers, {width}, {heads}, {gated}{inner}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Memory beside the weights at one length, in bytes.

    Attributes:
        length_tokens: of a window, or of a prompt with its answer.
        all_targets: of one window whose targets are all scored, as rolling, stream, sliding and position have them.
        last_targets: of one window whose last 256 targets are scored, as fixed_target has them.
        batch: of a full batch of such windows; a batch that does not fit is halved.
        generation: of one text: its keys and values, and its prompt being read.
        further_text: of every text more that is generated beside it.
    """

    length_tokens: int
    all_targets: int
    last_targets: int
    batch: int
    generation: int
    further_text: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How much memory there is, and how long one window that is scored, or a prompt and its answer, may be alone."""

    place: str
    device: str
    memory_bytes: int
    longest_window_tokens: int
    longest_text_tokens: int


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
    idle = sum(weight.numel() for weight in parameters.values() if weight.dim() == 3 and len(weight) == experts)
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
        parameters=sum(weight.numel() for weight in parameters.values()),
        other_embedding_parameters=0 if tied or embedding is None else embedding.numel(),
        idle_parameters=0 if not experts else idle * (experts - chosen) // experts,
        weight_bytes=sum(weight.numel() * weight.itemsize for weight in parameters.values()),
        item_bytes=model.dtype.itemsize,
    )


def experts_of(config: Any, hidden_size: int = 0) -> tuple[int, int, int, int]:
    """Returns experts, those chosen for a token, channels in each, and channels of an MLP that every token passes."""
    if width := _whole(config, "mlp_width"):  # ModuleFormer
        return config.mlp_experts, config.mlp_chosen, width, 0
    dense = _first(config, "intermediate_size", "n_inner") or 4 * hidden_size
    layers = [config, *(getattr(config, "layer_overrides", None) or [])]
    layers = [layer if isinstance(layer, dict) else vars(layer) for layer in layers]

    def most(*names: str) -> int:
        return max(layer.get(name) or 0 for layer in layers for name in names)

    chosen = most("num_experts_per_token", "num_experts_per_tok")
    experts = most("num_experts", "num_local_experts", "n_routed_experts")
    if not (experts and chosen):
        return 0, 0, 0, dense
    of_expert = _first(config, "moe_intermediate_size", "expert_intermediate_size") or dense
    return experts, chosen, of_expert, _first(config, "shared_intermediate_size") or 0


def _first(config: Any, *names: str) -> int | None:
    return next((value for name in names if (value := _whole(config, name))), None)


def _key_windows(config: Any, layers: int) -> tuple[int | None, ...]:
    window = _whole(config, "sliding_window") if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    keeping = [kind for kind in kinds if not any(name in kind for name in _NO_KEYS_KEPT)]
    return tuple(window if "sliding" in kind else None for kind in keeping)


def _whole(config: Any, name: str) -> int | None:
    try:
        value = getattr(config, name, None)
    except Exception:  # of any class: some configurations refuse what differs from layer to layer
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def needs(sizes: Sizes, length_tokens: int, *, device: str) -> Needs:
    """Returns what windows and texts of one length take on "cuda" or "cpu", which hold different numbers of logits."""
    batch_tokens = max(1, BATCH_TOKENS[device] // length_tokens) * length_tokens
    text = text_bytes(sizes, length_tokens)
    return Needs(
        length_tokens=length_tokens,
        all_targets=window_bytes(sizes, length_tokens, length_tokens, device),
        last_targets=window_bytes(sizes, length_tokens, min(length_tokens, 256), device),
        batch=window_bytes(sizes, batch_tokens, batch_tokens, device),
        generation=text + window_bytes(sizes, length_tokens, 1, device),
        further_text=text,
    )


def window_bytes(sizes: Sizes, tokens: int, scored: int, device: str) -> int:
    """Returns what scoring a batch of model inputs, of which so many are targets, takes at most beside the weights."""
    width = sizes.hidden_size
    query = sizes.heads * sizes.head_dim
    key = sizes.key_value_heads * sizes.head_dim
    in_attention = 2 * width + 3 * query + 3 * key  # projected, rotated, and what attention returns
    inner = 3 if sizes.gated else 2
    # a token stands before each of its experts, and what they return before it is summed
    to_experts = sizes.chosen_experts * (3 * width + inner * sizes.expert_size)
    at_once = min(tokens, sizes.tokens_of_experts_at_once or tokens)
    in_mlp = tokens * (4 * width + inner * sizes.inner_size) + at_once * to_experts
    body = max(tokens * in_attention, in_mlp) * sizes.item_bytes
    logits = min(scored * sizes.vocabulary, CHUNK_LOGITS[device])
    # on a CPU they are raised to fp32, and their exponentials stand beside them
    of_logit = sizes.item_bytes if device == "cuda" else sizes.item_bytes + 8
    return max(body, 2 * tokens * width * sizes.item_bytes + logits * of_logit)


def text_bytes(sizes: Sizes, length_tokens: int) -> int:
    """Returns what keys and values of one text take while it is generated."""
    room = -(-length_tokens // _ROOM_MULTIPLE) * _ROOM_MULTIPLE
    kept = sum(min(room, window or room) for window in sizes.key_windows)
    return sizes.key_value_heads * (sizes.cached_channels or 2 * sizes.head_dim) * kept * sizes.item_bytes


def longest_tokens(sizes: Sizes, memory_bytes: int, device: str) -> tuple[int, int]:
    """Returns the longest window and the longest generated text that fit, alone, in tokens; 0 where nothing does."""
    room = int(memory_bytes * (1 - KEPT_FREE)) - sizes.weight_bytes
    return (
        _longest(lambda tokens: window_bytes(sizes, tokens, tokens, device), room),
        _longest(lambda tokens: text_bytes(sizes, tokens) + window_bytes(sizes, tokens, 1, device), room),
    )


def _longest(takes: Callable[[int], int], room: int) -> int:
    return bisect.bisect_right(range(1, _MOST_TOKENS), room, key=takes)


def read_memory(text: str) -> int:
    """Returns a size such as 80GiB, 24GB or 512M in bytes.

    Raises:
        UserError: it is no size.
    """
    match = re.fullmatch(r"\s*(\d{1,16}(?:\.\d{1,6})?)\s*([KMGT]?i?B?)\s*", text)
    size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if not 0 < size < 2**62:
        raise UserError.expected("--memory to be a size such as 80GiB", found=f"{text[:50]!r}", remedy="correct it")
    return size


def device_here() -> str:
    """Returns the device a run would take here, "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def room_of(sizes: Sizes, memory_bytes: int | None, learned_positions: int | None) -> Room:
    """Returns how far so much memory of a GPU reaches, or with None what is free here; learned positions end it too."""
    device, place = "cuda", "a GPU"
    if memory_bytes is None:
        device = device_here()
        place = torch.cuda.get_device_name() if device == "cuda" else "the CPU of this machine"
        memory_bytes = _free_bytes(device)
    longest = longest_tokens(sizes, memory_bytes, device)
    window, text = (min(tokens, learned_positions or tokens) for tokens in longest)
    longest_of = {"longest_window_tokens": window, "longest_text_tokens": text}
    return Room(place=place, device=device, memory_bytes=memory_bytes, **longest_of)


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0
