"""KV caches of 8 bits for `cache=research.decoding_studies.rounded_caches:int8`, and `:fp8`.

Each key and each value of a head at a position has one scale, its largest number. `int8` rounds to 255 evenly spaced
numbers, `fp8` to those of float8_e4m3fn. The context is read unrounded and stored rounded; later tokens see the rounded
keys and values, as a decode kernel would that reads 8 bits. In fp64 with `kernels=reference`, only this rounding
changes NLL.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_FP8_MOST = torch.finfo(torch.float8_e4m3fn).max


def rounded_int8(x: Tensor) -> Tensor:
    """Rounds [..., D] to int8, with one scale for the last dimension."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (x / scale).round() * scale


def rounded_fp8(x: Tensor) -> Tensor:
    """Rounds [..., D] to float8_e4m3fn, with one scale for the last dimension."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / _FP8_MOST
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class RoundedLayer(DynamicLayer):
    """Cached keys and values of one layer, rounded by a function when they are stored."""

    def __init__(self, rounded: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._rounded = rounded

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores keys and values rounded; returns the first ones, those of the context, as they are."""
        is_context = not self.get_seq_length()
        stored: tuple[Tensor, Tensor] = super().update(self._rounded(key_states), self._rounded(value_states))
        return (key_states, value_states) if is_context else stored


def _cache(model: Any, rounded: Callable[[Tensor], Tensor]) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers = [RoundedLayer(rounded) for _ in cache.layers]
    return cache


def int8(model: Any) -> DynamicCache:
    """Returns an empty cache that rounds to int8."""
    return _cache(model, rounded_int8)


def fp8(model: Any) -> DynamicCache:
    """Returns an empty cache that rounds to float8_e4m3fn."""
    return _cache(model, rounded_fp8)
