"""What a cache holds of the newest position, from which the next one goes on."""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from sbeval.models.config import SbevalConfig
from sbeval.models.forgetting.decay import decay_channels
from sbeval.models.slots import SlotCache


def cached_channels(config: SbevalConfig, dtype: torch.dtype) -> int:
    """Returns how many numbers a key head keeps of a position: key and value, the decay, and both before a shift."""
    assert config.head_dim is not None
    assert config.num_key_value_heads is not None
    members = config.num_attention_heads // config.num_key_value_heads
    decay = decay_channels(members, dtype) if config.attention == "forgetting" else 0
    return 2 * (config.head_dim + decay) + config.head_dim * (config.key_shift + config.value_shift)


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
