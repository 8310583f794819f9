"""The bytes of the tensors that a KV cache holds."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache


def cache_bytes(cache: Cache) -> int:
    """Returns the bytes of all tensors that a cache holds, each counted once, views with their own numbers only."""
    tensors: dict[tuple[int, int], int] = {}
    for tensor in _tensors(list(cache.layers), set()):
        size = tensor.numel() * tensor.element_size()
        if size:
            tensors[tensor.data_ptr(), size] = size
    return sum(tensors.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yields the tensors inside nested lists, mappings, objects and tensor subclasses, such as those of quanto."""
    if id(value) in seen or isinstance(value, torch.nn.Module | type):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        flatten = getattr(value, "__tensor_flatten__", None)
        if flatten is None:
            yield value
        else:
            for name in flatten()[0]:
                yield from _tensors(getattr(value, name), seen)
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner, seen)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner, seen)
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value), seen)
