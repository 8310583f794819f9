"""What transformers' own loop needs to generate faster: a cache with room to grow, and attention without plans.

transformers' cache is concatenated anew for every token, which at 64K tokens copies gigabytes for each; here a new
token's keys and values are written behind the earlier ones. cuDNN's attention, PyTorch's first choice on recent GPUs,
makes a plan for every length of the keys it has not met yet. For a long text that is nothing; for a new token it takes
longer than the rest of the model.
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
    """One layer's keys and values, [B, G, K, D]: views of memory that is `GROWTH_TOKENS` longer whenever it is made.

    After crops, reordered beams and repeated rows they are no such views, or shorter ones; either way new tokens follow
    them.
    """

    _key_room: Tensor | None = None
    _value_room: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends [B, G, Q, D] each and returns all keys and all values; with gradients, as transformers does."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            appended: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return appended
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)  # type: ignore[no-untyped-call]
        self.keys, self._key_room = _append(self.keys, self._key_room, key_states)
        self.values, self._value_room = _append(self.values, self._value_room, value_states)
        return self.keys, self.values


def growing_cache(model: Any, cache_implementation: str | None) -> DynamicCache | None:
    """Returns an empty cache for `generate`, or None where the model is better left to make its own.

    Layers of other kinds, such as sliding windows, are transformers' own.
    """
    supports: Any = getattr(model, "_supports_default_dynamic_cache", None)
    asked = cache_implementation or getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if asked is not None or hasattr(model, "peft_config") or supports is None or not supports():
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


def _append(held: Tensor | None, room: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
    length = 0 if held is None or held.numel() == 0 else held.shape[-2]
    total = length + new.shape[-2]
    if room is None or held is None or not _fits(held, room, new, total):
        room = new.new_empty((*new.shape[:-2], total + GROWTH_TOKENS, new.shape[-1]))
        if held is not None and length:
            room[..., :length, :] = held
    room[..., length:total, :] = new
    return room[..., :total, :], room


def _fits(held: Tensor, room: Tensor, new: Tensor, total: int) -> bool:
    """Whether `held` is the beginning of `room`, with space behind it."""
    same = held.data_ptr() == room.data_ptr() and held.stride() == room.stride()
    return same and held.shape[:-2] == room.shape[:-2] == new.shape[:-2] and total <= room.shape[-2]


@contextlib.contextmanager
def steps_without_plans(model: nn.Module) -> Iterator[None]:
    """Within it, calls of `model` on a few new tokens do without cuDNN's attention; calls on more, a prompt, use it."""
    before: list[bool] = []
    allowed = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    called: nn.Module = getattr(model, "get_base_model", lambda: model)()  # PEFT hands generation on to it

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
        torch.backends.cuda.enable_cudnn_sdp(allowed)  # after an interrupted step too
