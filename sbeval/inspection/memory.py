"""Estimates the memory of scored windows and generated texts from a decoder's sizes, and the lengths that fit.

The peak memory of a window is reached either inside a block (residual stream, its norm, the output of attention or MLP
and their sum, the inner channels of the MLP, and the attention logits that entmax materialises) or at the logits of one
chunk of targets. Tables of cosine and sine, and the input embeddings of a transformers model, stay in memory beside
each block. cuBLAS's workspace is added.
`benchmarks/results/inspection.md` compares the estimates with measurements on a GPU.
"""

import bisect
import dataclasses
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from sbeval.caches.choice import CacheChoice, group_for, quantized_bytes
from sbeval.checkpoints.facts import text_config
from sbeval.errors import UserError
from sbeval.models.config import SCALED, WITH_ENTMAX
from sbeval.models.entmax.attention import block_bytes
from sbeval.models.forgetting.layer import cached_channels
from sbeval.models.mlp import MOST_TOKENS
from sbeval.rope_parameters import rope_entries
from sbeval.scoring.scorer import CHUNK_LOGITS

KEPT_FREE = 0.1
"""Fraction of the memory left free for uses that are not estimated: fragmentation, the CUDA context."""
BATCH_TOKENS = {"cpu": 8192, "cuda": 65536}
"""Most tokens in a batch of the model adapter."""
WORKSPACE_BYTES = {"cpu": 0, "cuda": 2**25}
"""PyTorch's workspace for cuBLAS on an H100 or H200, for each CUDA stream; smaller GPUs have one of 8 MiB."""
_ZONE_TENSORS = 16
"""Number of further tensors, each as large as the queries and in the model's dtype, that attention needs if an
extrapolation method treats near and far query-key pairs ("zones") differently: queries, keys and outputs of each zone,
and fp32 products of the outputs with the zones' shares of the weight. Fitted to peaks of SmolLM2-135M on an H100."""
_ROOM_MULTIPLE = 64
_MOST_TOKENS = 2**32
_WITHOUT_KV_CACHE = ("linear_attention", "mamba", "recurrent", "conv")
_UNITS = {"": 1, "B": 1} | {
    f"{unit}{end}": base**power
    for power, unit in enumerate("KMGT", 1)
    for end, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a decoder, in channels, heads and layers.

    Attributes:
        cached_channels: channels that the KV cache holds for each key head and position; None means one key and one
            value.
        inner_size: inner channels of the dense MLP; 0 if there are only experts.
        expert_size: inner channels of an expert; 0 without experts.
        chosen_experts: experts that each token passes.
        tokens_of_experts_at_once: largest number of tokens that the experts process at a time; None means all.
        gated: whether the MLP is gated.
        key_windows: for each layer with a KV cache, the largest number of positions it holds; None means all.
        parameters: number of parameters; weights shared by embedding and head count once.
        other_embedding_parameters: parameters of an input embedding that is not tied to the head.
        idle_parameters: parameters of the experts that a token does not pass.
        weight_bytes: bytes of all weights.
        item_bytes: bytes of one number in the residual stream.
        holds_embeddings: whether the input embeddings stay in memory until the forward pass ends, as in transformers'
            models.
        rope_tables: pairs of tables of cosine and sine, one for each type of layers with RoPE parameters of its own.
        zones: whether an extrapolation method computes near and far query-key pairs ("zones") separately.
        entmax: whether attention materialises the logits of a block of queries, as entmax does.
        scaled_queries: whether queries are multiplied in fp32 by factors that grow with the number of keys.
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
    holds_embeddings: bool = False
    rope_tables: int = 0
    zones: bool = False
    entmax: bool = False
    scaled_queries: bool = False

    def __str__(self) -> str:
        heads = f"{self.heads} heads of {self.head_dim}"
        if self.key_value_heads != self.heads:
            heads += f", {self.key_value_heads} of keys"
        mlp = f"MLP of {self.inner_size:,}" if self.inner_size else ""
        experts = f"{self.chosen_experts} experts of {self.expert_size:,} for each token" if self.chosen_experts else ""
        inner = " and ".join(filter(None, (mlp, experts)))
        gated = "gated " if self.gated else ""
        width = f"width {self.hidden_size:,}, vocabulary of {self.vocabulary:,}"
        return f"{self.layers} layers, {width}, {heads}, {gated}{inner}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Memory beside the weights at one length, in bytes.

    Attributes:
        length_tokens: length of a window, or of a prompt with its answer.
        all_targets: one window with all targets scored (protocols rolling, stream, sliding, position).
        last_targets: one window with the last 256 targets scored (protocol fixed_target).
        batch: a full batch of windows with all targets scored; a batch that does not fit is halved in a run.
        generation: generating one text: its KV cache and the prefill of its prompt.
        prefill: the prefill of a full batch of prompts. Several texts that are generated at the same time need it, and
            `further_text` for each of them.
        further_text: memory that each further text adds if several are generated at the same time: its KV cache.
    """

    length_tokens: int
    all_targets: int
    last_targets: int
    batch: int
    generation: int
    prefill: int
    further_text: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """Bytes that a token behind all sliding windows adds to the KV cache.

    Attributes:
        full: bytes in the model's own cache.
        cache: name of the replaced cache, None without `cache=...`.
        replaced: bytes in the replaced cache, without the residual; None if they are not known before a run, or if the
            cache does not suit the model.
        unsuited: why the replaced cache does not work with the model; None if it does.
    """

    full: float
    cache: str | None = None
    replaced: float | None = None
    unsuited: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The available memory, and the longest scored window and longest prompt with answer that fit with batch size 1."""

    place: str
    device: str
    memory_bytes: int
    longest_window_tokens: int
    longest_text_tokens: int


def sizes_of(model: PreTrainedModel) -> Sizes | None:
    """Returns the sizes of a model, None if its configuration lacks the usual names of heads, layers and width."""
    config: Any = text_config(model.config)
    parameters = dict(model.named_parameters())
    heads, layers = (_integer(config, name) for name in ("num_attention_heads", "num_hidden_layers"))
    hidden_size = _integer(config, "hidden_size")
    if not (heads and layers and hidden_size):
        return None
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    embeddings: Any = model.get_input_embeddings()
    head_weight = getattr(output, "weight", None)
    embedding = getattr(embeddings, "weight", None)
    tied = head_weight is embedding
    experts, chosen, expert_size, inner_size = experts_of(config, hidden_size)
    idle = sum(weight.numel() for weight in parameters.values() if weight.dim() == 3 and len(weight) == experts)
    return Sizes(
        hidden_size=hidden_size,
        layers=layers,
        # ModuleFormer's chosen experts have query heads of their own, which share its keys
        heads=heads * (_integer(config, "attention_chosen") or 1),
        key_value_heads=_integer(config, "num_key_value_heads") or heads,
        head_dim=_integer(config, "head_dim") or hidden_size // heads,
        cached_channels=cached_channels(config, model.dtype) if config.model_type == "sbeval" else None,
        inner_size=inner_size,
        expert_size=expert_size,
        chosen_experts=chosen,
        tokens_of_experts_at_once=MOST_TOKENS if config.model_type == "sbeval" else None,
        gated=any("gate_proj" in name or "gate_up" in name for name in parameters),
        vocabulary=_integer(config, "vocab_size") or 0,
        key_windows=_key_windows(config, layers),
        parameters=sum(weight.numel() for weight in parameters.values()),
        other_embedding_parameters=0 if tied or embedding is None else embedding.numel(),
        idle_parameters=0 if not experts else idle * (experts - chosen) // experts,
        weight_bytes=sum(weight.numel() * weight.itemsize for weight in parameters.values()),
        item_bytes=model.dtype.itemsize,
        holds_embeddings=not type(model).__module__.startswith("sbeval."),
        rope_tables=len(rope_entries(getattr(config, "rope_parameters", None))),
        entmax=config.model_type == "sbeval" and config.attention_weights in WITH_ENTMAX,
        scaled_queries=config.model_type == "sbeval" and config.attention_weights in SCALED,
    )


def experts_of(config: Any, hidden_size: int = 0) -> tuple[int, int, int, int]:
    """Returns experts, experts chosen for a token, inner channels of an expert, and inner channels of the dense MLP.

    Without experts the first three are 0.
    """
    if width := _integer(config, "mlp_width"):  # ModuleFormer
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
    expert_channels = _first(config, "moe_intermediate_size", "expert_intermediate_size") or dense
    return experts, chosen, expert_channels, _first(config, "shared_intermediate_size") or 0


def _first(config: Any, *names: str) -> int | None:
    """Returns the first of these attributes that is a nonzero integer."""
    return next((value for name in names if (value := _integer(config, name))), None)


def _key_windows(config: Any, layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer with a KV cache, None for full attention."""
    window = _integer(config, "sliding_window") if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    cached_kinds = [kind for kind in kinds if not any(name in kind for name in _WITHOUT_KV_CACHE)]
    return tuple(window if "sliding" in kind else None for kind in cached_kinds)


def _integer(config: Any, name: str) -> int | None:
    """Returns an integer attribute, None if it is missing or of another type."""
    try:
        value = getattr(config, name, None)
    except Exception:  # some configurations raise for attributes that differ between layers
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def needs(sizes: Sizes, length_tokens: int, *, device: str) -> Needs:
    """Returns the memory that windows and texts of one length need; chunks of logits differ on "cuda" and "cpu"."""
    rows = max(1, BATCH_TOKENS[device] // length_tokens)
    batch_tokens = rows * length_tokens
    return Needs(
        length_tokens=length_tokens,
        all_targets=window_bytes(sizes, length_tokens, length_tokens, device),
        last_targets=window_bytes(sizes, length_tokens, min(length_tokens, 256), device),
        batch=window_bytes(sizes, batch_tokens, batch_tokens, device, rows=rows),
        generation=_generation_bytes(sizes, length_tokens, device),
        # decode steps are captured in a CUDA graph on a stream of their own
        prefill=window_bytes(sizes, batch_tokens, rows, device, rows=rows) + WORKSPACE_BYTES[device],
        further_text=text_bytes(sizes, length_tokens),
    )


def _generation_bytes(sizes: Sizes, length_tokens: int, device: str) -> int:
    prefill = window_bytes(sizes, length_tokens, 1, device) + WORKSPACE_BYTES[device]
    return text_bytes(sizes, length_tokens) + prefill


def window_bytes(sizes: Sizes, tokens: int, scored: int, device: str, *, rows: int = 1) -> int:
    """Returns the peak bytes, without the weights, of scoring a batch.

    Args:
        sizes: sizes of the decoder.
        tokens: number of input tokens in all rows.
        scored: number of targets in all rows.
        device: "cuda" or "cpu".
        rows: number of windows in the batch.
    """
    width, query, key = sizes.hidden_size, sizes.heads * sizes.head_dim, sizes.key_value_heads * sizes.head_dim
    in_attention = 2 * width + 3 * query + 3 * key  # q, k, v, their copies with RoPE, and the output of attention
    in_attention += _ZONE_TENSORS * query if sizes.zones else 0
    inner = 3 if sizes.gated else 2
    # every token is copied for each of its experts, and their outputs exist before they are summed
    expert_channels = sizes.chosen_experts * (3 * width + inner * sizes.expert_size)
    at_once = min(tokens, sizes.tokens_of_experts_at_once or tokens)
    in_mlp = tokens * (4 * width + inner * sizes.inner_size) + at_once * expert_channels
    held = sizes.rope_tables * 2 * sizes.head_dim * -(-tokens // rows) + sizes.holds_embeddings * tokens * width
    in_attention_bytes = tokens * in_attention * sizes.item_bytes
    if sizes.entmax:
        in_attention_bytes += block_bytes(
            sizes.heads, sizes.key_value_heads, sizes.head_dim, tokens, device, batch=rows
        )
    if sizes.scaled_queries:
        # the queries and their products in fp32, beside queries, keys and values
        in_scaling_bytes = tokens * (2 * width + query + 3 * key) * sizes.item_bytes
        in_scaling_bytes += tokens * 2 * query * torch.float32.itemsize
        in_attention_bytes = max(in_attention_bytes, in_scaling_bytes)
    body = max(in_attention_bytes, in_mlp * sizes.item_bytes) + held * sizes.item_bytes
    logits = min(scored * sizes.vocabulary, CHUNK_LOGITS[device])
    # on a CPU logits are converted to fp32, and their exponentials exist beside them
    logit_bytes = sizes.item_bytes if device == "cuda" else sizes.item_bytes + 8
    return max(body, 2 * tokens * width * sizes.item_bytes + logits * logit_bytes) + WORKSPACE_BYTES[device]


def text_bytes(sizes: Sizes, length_tokens: int) -> int:
    """Returns the bytes of the KV cache of one generated text."""
    room = -(-length_tokens // _ROOM_MULTIPLE) * _ROOM_MULTIPLE
    cached_positions = sum(min(room, window or room) for window in sizes.key_windows)
    channels = sizes.cached_channels or 2 * sizes.head_dim
    return sizes.key_value_heads * channels * cached_positions * sizes.item_bytes


def cache_size(sizes: Sizes, choice: CacheChoice | None, unsuited: str | None = None) -> CacheSize:
    """Returns the bytes of a token in the model's own cache and in a replaced one, unless the model refuses that.

    Raises:
        UserError: the group size of a quantized cache does not divide the channels of a head.
    """
    layers = sum(window is None for window in sizes.key_windows)
    channels = sizes.key_value_heads * (sizes.cached_channels or 2 * sizes.head_dim) * layers
    full = float(channels * sizes.item_bytes)
    if choice is None:
        return CacheSize(full=full)
    if unsuited is not None:
        return CacheSize(full=full, cache=str(choice), unsuited=unsuited)
    replaced = None if choice.kind == "function" else full
    if choice.bits is not None:
        replaced = quantized_bytes(choice.bits, group_for(choice, sizes.head_dim), channels, sizes.item_bytes)
    return CacheSize(full=full, cache=str(choice), replaced=replaced)


def longest_tokens(sizes: Sizes, memory_bytes: int, device: str) -> tuple[int, int]:
    """Returns the longest window and the longest text, in tokens, that fit with batch size 1; 0 if nothing fits."""
    room = int(memory_bytes * (1 - KEPT_FREE)) - sizes.weight_bytes
    return (
        _longest(lambda tokens: window_bytes(sizes, tokens, tokens, device), room),
        _longest(lambda tokens: _generation_bytes(sizes, tokens, device), room),
    )


def _longest(bytes_at: Callable[[int], int], room: int) -> int:
    """Returns the largest number of tokens whose bytes fit into `room`, by bisection."""
    return bisect.bisect_right(range(1, _MOST_TOKENS), room, key=bytes_at)


def read_memory(text: str) -> int:
    """Parses a size such as 80GiB, 24GB or 512M into bytes.

    Raises:
        UserError: the text is no size.
    """
    match = re.fullmatch(r"\s*(\d{1,16}(?:\.\d{1,6})?)\s*([KMGT]?i?B?)\s*", text)
    size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if not 0 < size < 2**62:
        raise UserError.expected("--memory to be a size such as 80GiB", found=f"{text[:50]!r}", remedy="correct it")
    return size


def device_here() -> str:
    """Returns the device that a run uses on this machine, "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def room_of(sizes: Sizes, memory_bytes: int | None, learned_positions: int | None) -> Room:
    """Returns what fits into a GPU with `memory_bytes`, or into the free memory of this machine if that is None.

    If the model has learned position embeddings, their number `learned_positions` limits the lengths too.
    """
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
    """Returns the free memory of the GPU or the machine; 0 if the system does not tell."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0
