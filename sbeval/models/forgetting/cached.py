"""What a cache holds of the newest position, from which the next one goes on."""

from typing import Any

from torch import Tensor
from transformers import Cache

from sbeval.models.slots import SlotCache


def cached_last(cache: Cache | None, layer_index: int) -> tuple[Tensor | None, Tensor | None]:
    """Returns keys and values [B, G, 1, ...] as they were cached; Nones without a cache or for an empty one.

    Raises:
        ValueError: the cache is of slots, which do not tell their newest positions.
    """
    if isinstance(cache, SlotCache):
        raise ValueError("slots do not tell a layer what came last, which forget gates and token shifts need")
    if cache is None or not cache.get_seq_length(layer_index):
        return None, None
    layer: Any = cache.layers[layer_index]
    return layer.keys[:, :, -1:], layer.values[:, :, -1:]
