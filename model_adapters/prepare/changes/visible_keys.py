"""Sliding-window, chunked and sink attention of transformers' models, without an attention mask of all token pairs.

For such layers transformers builds a mask of all pairs of tokens, and eager attention computes a weight for each pair.
A model requests its mask function and its attention function by the name of an attention implementation, so this file
registers an implementation of its own. For a long text without padding, its mask function returns a small description
of the visible keys, `VisibleKeys`, instead of a tensor, after it has tested that the model's own mask agrees. Its
attention function then computes the visible keys only: PyTorch's flash kernel supports windows, a reshape turns chunks
into a batch, and the log-sum-exp of the logits gives the weight of a sink. In all other cases it calls the
implementation that the model had before.

At its first long text, each layer is compared with the earlier implementation, on `_COMPARED_TOKENS` more tokens than
its window or chunk has. Logits of the whole model are not compared, since any rounding may send a token to another
expert. Layers with soft-capped logits, or with values of another width than keys, keep the earlier implementation.
FlexAttention was tried instead; it compiles for seconds and was slower (benchmarks/results/families_h200.md).

Shape suffixes: B batch, H query heads, G key/value heads, L positions, D head_dim, K keys that some rows see, R rows of
a block, N chunks, C positions of a chunk, P probed keys of each query.
"""

import contextlib
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Collection
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sbeval.model_adapters.prepare.change import Change, Undo
from sbeval.model_adapters.prepare.replacing import temporary_attributes
from sbeval.model_adapters.prepare.sample import sample_tokens
from sbeval.models.softmax import MASK_ELEMENTS, cudnn_attention, softmax_attention
from sbeval.scoring.body import no_cache

logger = logging.getLogger(__name__)

SHORTEST_TOKENS = 1024
_SAMPLE_TOKENS, _LONGER_TOKENS = 16, 320
_COMPARED_TOKENS = 128  # how many tokens more than a window or chunk has are compared
_SAME = 1e-4  # the largest allowed difference in fp32, divided by the largest absolute value
_NAME = "sbeval_visible_keys_"
_ATTRIBUTE = "_attn_implementation_internal"
_MORE = ("softcap", "position_bias", "cache", "output_attentions")
_FLASH_HEAD_DIM = 256
_KEEPS = "sbeval's attention to sliding windows and sinks differs from that of {}, which keeps its own"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VisibleKeys:
    """Describes the keys that each query of a text sees: from the first key of its window or chunk to its own position.

    Attributes:
        window: the number of newest keys that a query sees, None for all keys.
        chunk: the length of attention chunks: a query sees only earlier keys of its own chunk. None without chunks.
        mask: takes a number of positions, and returns the model's own mask tensor for that many first positions.
    """

    window: int | None
    chunk: int | None
    mask: Callable[[int], Tensor | None]

    def first(self, query: Tensor) -> Tensor:
        """Returns the position of the oldest key that each query sees."""
        if self.chunk is not None:
            return query - query % self.chunk
        return torch.zeros_like(query) if self.window is None else (query - self.window + 1).clamp_min(0)

    def within(self, length: int) -> Self:
        """Returns a copy for a text of this length, without a window or chunk that covers the whole text."""
        window = None if self.window is None or self.window >= length else self.window
        chunk = None if self.chunk is None or self.chunk >= length else self.chunk
        return dataclasses.replace(self, window=window, chunk=chunk)

    def contiguous(self) -> Self:
        """Returns itself; it exists because `generate` calls this method on every mask."""
        return self


_trials: "WeakKeyDictionary[nn.Module, _SeenKeys]" = WeakKeyDictionary()
"""The newest `_SeenKeys` of each model, which records the modules that keep their own attention."""


def see_keys(model: Any) -> Undo | None:
    """Makes the attention of a transformers model compute only the keys that its layers see.

    Returns the function that undoes the change. Returns None for a model without windows, chunks and sinks, and for a
    model whose attention implementation the user chose. `_SeenKeys` compares each layer with the original attention.
    """
    before = getattr(model.config, "_attn_implementation", None)
    if before != ("sdpa" if getattr(model, "_supports_sdpa", False) else "eager"):
        return None
    trial = _trials[model] = _SeenKeys(before, shortest_tokens=1)
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    changed = [config for config in configs.values() if getattr(config, _ATTRIBUTE, None) == before]
    with temporary_attributes([(config, {_ATTRIBUTE: trial.register(f"{_NAME}trial")}) for config in changed]):
        # the longer text is for layers with longer windows; it is read only if some layer uses the new attention
        if not (_runs(model, _SAMPLE_TOKENS) and trial.served and _runs(model, _LONGER_TOKENS)):
            return None

    def attend_by(name: str) -> None:
        for config in changed:
            setattr(config, _ATTRIBUTE, name)

    attend_by(_registered(before).name)
    return functools.partial(attend_by, before)


def notes(model: nn.Module) -> list[str]:
    """Returns a sentence for each class of attention module that keeps its own attention."""
    before = attention_before(getattr(getattr(model, "config", None), "_attn_implementation", None))
    modules = {id(module) for module in model.modules()}
    implementations = [] if before is None else [_registered(before)]
    if (trial := _trials.get(model)) is not None:
        implementations.append(trial)
    kept = {name for implementation in implementations for name in implementation.different(modules)}
    return [_KEEPS.format(name) for name in sorted(kept)]


def attention_before(implementation: str | None) -> str | None:
    """Returns the name of an attention implementation without the prefix that `see_keys` adds."""
    return None if implementation is None else implementation.removeprefix(_NAME)


@functools.cache
def _registered(before: str) -> "_SeenKeys":
    implementation = _SeenKeys(before)
    implementation.register(f"{_NAME}{before}")
    return implementation


@torch.no_grad()
def _runs(model: Any, length: int) -> bool:
    embeddings = model.get_input_embeddings().weight.shape[0]
    tokens = torch.tensor(sample_tokens(None, embeddings, length), device=model.device)[None]
    with contextlib.suppress(RuntimeError, TypeError, ValueError, AttributeError, AssertionError, LookupError):
        model(input_ids=tokens, **no_cache(model))
        return True
    return False


class _SeenKeys:
    """The attention implementation (mask and attention function) that replaces the one named `before`."""

    def __init__(self, before: str, shortest_tokens: int | None = None) -> None:
        self._before, self._shortest = before, shortest_tokens
        self.name = ""
        self.served = False  # whether any layer has a window, chunks or a sink
        self._same: WeakKeyDictionary[nn.Module, dict[tuple[int | None, int | None], bool]] = WeakKeyDictionary()

    def register(self, name: str) -> str:
        ALL_ATTENTION_FUNCTIONS.register(name, self.attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, self.mask)
        self.name = name
        return name

    def different(self, modules: Collection[int]) -> list[str]:
        """Returns the class names of the modules that keep their own attention; `modules` are the ids to look among."""
        kept = (module for module, same in self._same.items() if id(module) in modules and not all(same.values()))
        return sorted({type(module).__name__ for module in kept})

    def mask(self, batch_size: int, q_length: int, kv_length: int, **options: Any) -> Any:
        """Returns a `VisibleKeys` for a long text without padding, else the mask of the implementation `before`."""
        original = ALL_MASK_ATTENTION_FUNCTIONS[self._before]

        @functools.lru_cache(maxsize=2)  # all layers with the same window share a mask
        def of_first(length: int) -> Any:
            padding = options.get("attention_mask")
            first = {} if padding is None else {"attention_mask": padding[:, :length]}
            return original(batch_size=batch_size, q_length=length, kv_length=length, **{**options, **first})

        size = options.get("local_size")
        if q_length == kv_length >= (self._shortest or SHORTEST_TOKENS) and not options.get("use_vmap"):
            offsets = [options.get("q_offset", 0), options.get("kv_offset", 0)]
            padding = options.get("attention_mask")
            unpadded = padding is None or (padding.shape == (batch_size, kv_length) and bool(padding.all()))
            if unpadded and all(type(offset) is int and offset == 0 for offset in offsets):
                for window, chunk in ((None, None),) if size is None else ((size, None), (None, size)):
                    seen = VisibleKeys(window=window, chunk=chunk, mask=of_first)
                    if _agrees(options["mask_function"], seen, batch_size, q_length, options.get("device", "cpu")):
                        return seen
        return original(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **options)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output [B, L, H, D], and the attention weights if the implementation `before` computed them."""
        original = functools.partial(self._original(module), module)
        if not isinstance(attention_mask, VisibleKeys):
            return original(query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
        length, sink_H = query.shape[2], options.get("s_aux")
        seen = attention_mask.within(length)
        more = options.get("dropout") or any(options.get(name) not in (None, False) for name in _MORE)
        if not more and query.shape[-1] == value.shape[-1] and length == key.shape[2]:
            scaling = options.get("scaling")
            scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
            attend = functools.partial(attention_to_visible, seen=seen, scale=scale, sink_H=sink_H)
            same, kind = self._same.setdefault(module, {}), (seen.window, seen.chunk)
            if kind not in same:
                few = min(length, (seen.window or seen.chunk or 0) + _COMPARED_TOKENS)
                first = [x[:, :, :few] for x in (query, key, value)]
                same[kind] = _same(attend, functools.partial(original, **options), first, _on(seen.mask(few), query))
                if not same[kind]:
                    logger.warning("%s", _KEEPS.format(type(module).__name__))
            if same[kind]:
                self.served |= sink_H is not None or attention_mask.window is not None or seen.chunk is not None
                return attend(query, key, value).transpose(1, 2).contiguous(), None
        return original(query, key, value, _on(seen.mask(length), query), **options)  # type: ignore[no-any-return]

    def _original(self, module: nn.Module) -> Callable[..., Any]:
        # eager attention is not in the table: each model's file defines its own
        eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(self._before, eager)
        return function


def _on(mask: Tensor | None, query: Tensor) -> Tensor | None:
    return None if mask is None else mask.to(query.device)  # layers may be on different devices


@torch.no_grad()
def _same(
    attend: Callable[..., Tensor], original: Callable[..., Any], heads: list[Tensor], mask: Tensor | None
) -> bool:
    """Whether our attention in fp32 equals the model's in fp32, and ours in the model's dtype equals ours in fp32.

    Differences up to rounding, relative to the largest value, are allowed. The newest positions, whose window leaves
    out older keys, are also compared relative to the largest value among them.
    """
    with torch.autocast(heads[0].device.type, enabled=False):
        try:
            wide = [x.double() if x.dtype == torch.float64 else x.float() for x in heads]
            expected, definition = original(*wide, mask)[0], attend(*wide).transpose(1, 2)
            rounded = attend(*heads).transpose(1, 2)
        except (RuntimeError, TypeError, ValueError):
            return False
    newest = slice(-_COMPARED_TOKENS, None)
    eps = torch.finfo(heads[0].dtype).eps

    def near(result: Tensor, wanted: Tensor, share: float) -> bool:
        return bool((result - wanted).abs().max() <= share * wanted.abs().max())  # false for NaN

    return all(
        near(definition[:, rows], expected[:, rows], _SAME)
        and near(rounded[:, rows].to(definition.dtype), definition[:, rows], max(_SAME, 8 * eps))
        for rows in (slice(None), newest)
    )


def _agrees(function: Any, seen: VisibleKeys, texts: int, length: int, device: torch.device | str) -> bool:
    """Whether a model's mask function lets each query see the keys that `seen` describes.

    For each query, it tests the first and the last visible key and the keys beside them, the key in the middle, and a
    random key.
    """
    query_L = torch.arange(length, device=device)
    first_L = seen.first(query_L)
    chance_L = torch.randint(length, (length,), generator=torch.Generator().manual_seed(length)).to(device)
    ends = [first_L, first_L - 1, query_L, query_L + 1, (first_L + query_L) // 2, chance_L]
    key_P1L = torch.stack(ends).clamp(0, length - 1)[:, None]
    expected_P1L = (key_P1L >= first_L) & (key_P1L <= query_L)
    text_B1 = torch.arange(texts, device=device)[:, None]
    pairs = [x.expand(len(ends), texts, length) for x in (text_B1, torch.zeros_like(text_B1), query_L, key_P1L)]
    try:
        true_PBL = function(*pairs)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    return torch.equal(true_PBL.expand_as(pairs[0]), expected_P1L.expand_as(pairs[0]))


def attention_to_visible(
    q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, *, seen: VisibleKeys, scale: float, sink_H: Tensor | None
) -> Tensor:
    """Returns softmax attention [B, H, L, D] to the visible keys, and to a sink with the logits [H] if there is one."""
    seen = seen.within(q_BHLD.shape[2])
    attend = functools.partial(_attend, scale=scale, sink_H=sink_H)
    if seen.chunk is not None:
        return _in_chunks(q_BHLD, k_BGLD, v_BGLD, seen.chunk, attend)
    return attend(q_BHLD, k_BGLD, v_BGLD, window=seen.window)


def _in_chunks(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, chunk: int, attend: Callable[..., Tensor]) -> Tensor:
    texts, heads, length, head_dim = q_BHLD.shape
    added = -length % chunk  # padding after the text, which causal attention hides from the text

    def apart(x_BHLD: Tensor) -> Tensor:
        x_BHNCD = pad(x_BHLD, (0, 0, 0, added)).reshape(texts, x_BHLD.shape[1], -1, chunk, head_dim)
        return x_BHNCD.transpose(1, 2).flatten(0, 1)

    output = attend(*(apart(x) for x in (q_BHLD, k_BGLD, v_BGLD)), window=None)
    output_BNHCD = output.reshape(texts, -1, heads, chunk, head_dim)
    return output_BNHCD.transpose(1, 2).flatten(2, 3)[:, :, :length]


def _attend(
    q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, *, window: int | None, scale: float, sink_H: Tensor | None
) -> Tensor:
    heads, length, head_dim = q_BHLD.shape[1:]
    half = q_BHLD.is_cuda and q_BHLD.dtype in (torch.float16, torch.bfloat16)
    flash = half and head_dim % 8 == 0 and head_dim <= _FLASH_HEAD_DIM
    if sink_H is None and (window is None or not flash):
        return softmax_attention(q_BHLD, k_BGLD, v_BGLD, scale=scale, sliding_window=window)
    if sink_H is not None and not flash:
        return _with_sinks(q_BHLD, k_BGLD, v_BGLD, window=window or length, scale=scale, sink_H=sink_H)
    output_BHLD: Tensor
    if window is None:
        output_BHLD, log_sum = cudnn_attention(q_BHLD, k_BGLD, v_BGLD, scale, True)
    else:
        whole = [x.transpose(1, 2) for x in (q_BHLD, k_BGLD, v_BGLD)]
        sides = {"window_size_left": window - 1, "window_size_right": 0}
        flash_attention = torch.ops.aten._flash_attention_forward
        output, log_sum = flash_attention(*whole, None, None, length, length, 0.0, False, False, scale=scale, **sides)[
            :2
        ]
        output_BHLD = output.transpose(1, 2)
    if sink_H is None:
        return output_BHLD
    # scales the output without the sink by the fraction of attention weight that the keys keep beside the sink
    share_BHL1 = torch.sigmoid(log_sum.reshape(-1, heads, length, 1) - sink_H.float()[:, None, None])
    return (output_BHLD * share_BHL1).to(q_BHLD.dtype)


def _with_sinks(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, *, window: int, scale: float, sink_H: Tensor) -> Tensor:
    """Computes attention with sinks from its definition, for one block of queries after another to limit memory."""
    texts, heads, length, _ = q_BHLD.shape
    k_BHLD, v_BHLD = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k_BGLD, v_BGLD))
    most = MASK_ELEMENTS["cuda" if q_BHLD.is_cuda else "cpu"] // (texts * heads)
    rows = max(16, min(window, most // (2 * window)), most // length)  # a block sees 2 * window keys at most, or all
    sink_BHR1 = sink_H.to(q_BHLD.dtype)[:, None, None]
    outputs = []
    for start in range(0, length, rows):
        stop = min(length, start + rows)
        oldest = max(0, start - window + 1)
        distance_RK = torch.arange(start, stop)[:, None] - torch.arange(oldest, stop)
        hidden_RK = ((distance_RK < 0) | (distance_RK >= window)).to(q_BHLD.device)
        logit_BHRK = q_BHLD[:, :, start:stop] @ k_BHLD[:, :, oldest:stop].transpose(2, 3) * scale
        logit_BHRK = logit_BHRK.masked_fill(hidden_RK, -torch.inf)
        logits_with_sink = torch.cat([logit_BHRK, sink_BHR1.expand(texts, heads, stop - start, 1)], dim=3)
        outputs.append(logits_with_sink.softmax(3)[..., :-1] @ v_BHLD[:, :, oldest:stop])
    return torch.cat(outputs, dim=2)


CHANGE = Change(
    name="attention to visible keys",
    apply=lambda model, setting: see_keys(model),
    applies_to=lambda setting: setting.causal and not setting.attention_named,
)
