"""Makes transformers' `generate` faster: a preallocated KV cache, and decode steps without cuDNN's attention.

transformers concatenates its cache with the new keys and values for every token. At 64K tokens that copies gigabytes
in each decode step. Here the cache has spare room, and new keys and values are written after the earlier ones.

PyTorch's SDPA prefers cuDNN's attention on recent GPUs. cuDNN builds an execution plan for each new number of keys. In
a prefill that takes no noticeable time, but at 64K tokens it took three quarters of a decode step. So decode steps use
another kernel, and prefills still use cuDNN's, which is the fastest.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

GROWTH_TOKENS = 256
MOST_NEW_TOKENS = 16


class GrowingLayer(DynamicLayer):
    """The cached keys and values of one layer, [B, G, K, D], as views of tensors with room for `GROWTH_TOKENS` more.

    transformers may crop the cache, reorder its beams or repeat its rows, and so replace the keys by another tensor or
    a shorter view. New tokens are appended correctly in each case.
    """

    _key_room: Tensor | None = None
    _value_room: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends new keys and values, each [B, G, Q, D], and returns all keys and all values.

        If gradients are needed, it concatenates as transformers does.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            appended: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return appended
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)  # type: ignore[no-untyped-call]
        self.keys, self._key_room = _append(self.keys, self._key_room, key_states)
        self.values, self._value_room = _append(self.values, self._value_room, value_states)
        return self.keys, self.values


def growing_cache(model: Any, cache_implementation: str | None) -> DynamicCache | None:
    """Returns an empty cache for `generate`, or None if the model must make its own.

    Only layers with full attention become `GrowingLayer`s; others, such as sliding-window layers, stay transformers'.
    """
    supports: Any = getattr(model, "_supports_default_dynamic_cache", None)
    requested = cache_implementation or getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if requested is not None or hasattr(model, "peft_config") or supports is None or not supports():
        return None
    try:
        cache = DynamicCache(config=model.config)
    except (AttributeError, KeyError, TypeError):
        return None
    if not any(type(layer) is DynamicLayer for layer in cache.layers):
        return None
    growing: Any = GrowingLayer
    cache.layers = [growing() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _append(cached: Tensor | None, room: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
    length = 0 if cached is None or cached.numel() == 0 else cached.shape[-2]
    total = length + new.shape[-2]
    if room is None or cached is None or not _fits(cached, room, new, total):
        room = new.new_empty((*new.shape[:-2], total + GROWTH_TOKENS, new.shape[-1]))
        if cached is not None and length:
            room[..., :length, :] = cached
    room[..., length:total, :] = new
    return room[..., :total, :], room


def _fits(cached: Tensor, room: Tensor, new: Tensor, total: int) -> bool:
    """Whether `cached` is a view of the first positions of `room`, and `room` has space for the new tokens."""
    same = cached.data_ptr() == room.data_ptr() and cached.stride() == room.stride()
    return same and cached.shape[:-2] == room.shape[:-2] == new.shape[:-2] and total <= room.shape[-2]


@contextlib.contextmanager
def steps_without_plans(model: nn.Module) -> Iterator[None]:
    """Inside this context, decode steps of `model` do not use cuDNN's attention; prefills still use it."""
    before: list[bool] = []
    allowed = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    # a PEFT model passes generation on to its base model
    called: nn.Module = getattr(model, "get_base_model", lambda: model)()

    def enter(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        before.append(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
        new = arguments[0] if arguments else keywords.get("input_ids")
        if isinstance(new, torch.Tensor) and new.shape[-1] <= MOST_NEW_TOKENS:
            torch.backends.cuda.enable_cudnn_sdp(False)

    def leave(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        torch.backends.cuda.enable_cudnn_sdp(before.pop())

    entering = called.register_forward_pre_hook(enter, with_kwargs=True)
    leaving = called.register_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        entering.remove()
        leaving.remove()
        torch.backends.cuda.enable_cudnn_sdp(allowed)  # in case a forward pass was interrupted while it was off
