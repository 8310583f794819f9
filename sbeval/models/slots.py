"""KV cache for batched generation: one slot of fixed size for each text, with the texts' lengths on the device.

A prompt is written from the beginning of its slot, without left-padding, and each decode step appends a few positions.
A decode step reads no number from the host, so a CUDA graph can capture and replay it.

Shape suffixes: B slots, N texts in a prefill, H query heads, G key/value heads, K capacity of a slot in keys, Q new
positions, D head_dim.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from sbeval.models.biases import alibi

MOST_QUERIES = 64
"""Limit of a decode step: query heads that share a key head, times new positions."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Filling:
    """A prefill: slots of the prompts (int64), length of each prompt (int64), and the first position of this chunk."""

    slots_N: Tensor
    length_N: Tensor
    begin: int


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Cached keys and values of one layer, [B, G, K, D] each.

    With a `sliding_window`, a slot is a ring buffer of that many keys; None stores all keys.
    """

    is_compileable = True
    keys: Tensor
    values: Tensor

    def __init__(self, cache: "SlotCache", sliding_window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = weakref.proxy(cache)  # a reference cycle would delay freeing the memory
        self.is_sliding = sliding_window is not None
        self.room_tokens = min(cache.room_tokens, sliding_window or cache.room_tokens)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates the slots, with head counts, head_dim and dtype of the first keys and values."""

        def room(new: Tensor) -> Tensor:
            # zeros, since places beyond a text are read with weight 0: a NaN there would reach the output
            return new.new_zeros((self._cache.slots, new.shape[1], self.room_tokens, new.shape[3]))

        self.keys, self.values = room(key_states), room(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes new keys and values: [N, G, Q, D] in a prefill, [B, G, Q, D] in a decode step.

        Returns:
            The keys and values that the new positions attend to.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if (filling := self._cache.filling) is not None:
            both = (self.keys, key_states), (self.values, value_states)
            visible_k, visible_v = (
                new if filling.begin == 0 else _after_earlier(room, new, filling) for room, new in both
            )
            for room, new in both:
                _fill(room, new, filling)
            return visible_k, visible_v
        _write(self.keys, self.values, key_states, value_states, self._cache.position_B)
        return self.attended()

    def attended(self) -> tuple[Tensor, Tensor]:
        """Returns the keys and values that a decode step attends to; the first `SlotCache.length_B` are valid."""
        self._cache.length_B = self._cache.lengths_B[self.room_tokens]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Returns the number of earlier positions in a chunked prefill; 0 in a decode step, which gets position ids."""
        return 0 if self._cache.filling is None else self._cache.filling.begin

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """Returns the number of keys in the mask of a prefill, and the position of the first of them."""
        begin = self.get_seq_length()
        earlier = min(begin, self.room_tokens)
        return earlier + int(query_length), begin - earlier

    def get_max_length(self) -> int:
        """Returns the capacity of a slot in tokens."""
        return self.room_tokens

    get_max_cache_shape = get_max_length  # the name of this method in transformers before 5.20


class SlotCache(Cache):
    """KV cache with `slots` texts of at most `room_tokens` tokens: prefill inside `fill`, decode steps outside of it.

    A decode step has the same number of new positions in every slot. `sliding_windows` has one entry for each layer,
    None for full attention.

    Attributes:
        position_B: int32, position that the next decode step writes first; set by the caller.
        lengths_B: maps the capacity that slots have in a layer to int32 [B], the number of keys that a decode step
            attends to in layers with that capacity; set by `begin_step`.
        length_B: `lengths_B` of the layer that was updated last.
        filling: the prefill in progress, None outside `fill`.
    """

    def __init__(
        self, *, slots: int, room_tokens: int, sliding_windows: list[int | None], device: torch.device | str
    ) -> None:
        self.slots, self.room_tokens = slots, room_tokens
        self.position_B = torch.zeros(slots, dtype=torch.int32, device=device)
        self.length_B = self.position_B + 1
        self.lengths_B: dict[int, Tensor] = {}
        self.filling: Filling | None = None
        layers: list[Any] = [SlotLayer(self, window) for window in sliding_windows]
        self._rooms = {layer.room_tokens for layer in layers}
        super().__init__(layers=layers)

    @contextlib.contextmanager
    def fill(self, slots_N: Tensor, length_N: Tensor, begin: int = 0) -> Iterator[None]:
        """Context manager for a prefill: forward passes take right-padded prompts and write their keys into slots.

        The arguments are those of `Filling`; positions before `begin` must already be in the slots.
        """
        self.filling = Filling(slots_N=slots_N, length_N=length_N, begin=begin)
        try:
            yield
        finally:
            self.filling = None

    def clear(self, slots_N: Tensor) -> None:
        """Zeroes slots before reuse: a NaN of an earlier text would reach the output although its weight is 0."""
        layers: list[Any] = self.layers
        for layer in layers:
            # the GPU kernels do not read beyond the end of a text
            if layer.is_initialized and not (layer.keys.is_cuda and layer.keys.dtype != torch.float64):
                layer.keys[slots_N] = layer.values[slots_N] = 0

    def begin_step(self, new: int = 1) -> None:
        """Computes `lengths_B` for a decode step with `new` positions in each slot, which the lengths include."""
        length_B = self.position_B + new
        # with programmatic dependent launch, attention kernels read the lengths before the previous kernel has ended,
        # so they must not be computed between the layers
        self.lengths_B = {room: length_B.clamp_max(room) for room in self._rooms}


def softmax_decode(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    length_B: Tensor,
    *,
    scale: float,
    sink_H: Tensor | None = None,
    slope_H: Tensor | None = None,
) -> Tensor:
    """Computes softmax attention of a decode step: each slot's newest Q positions attend to the slot's keys.

    Args:
        q_BHQD: queries of the newest positions.
        k_BGKD: keys of the slots.
        v_BGKD: values of the slots.
        length_B: number of valid keys in each slot, including those of the newest positions; at least Q.
        scale: factor of the logits.
        sink_H: attention sink, a logit for each head that takes part in the softmax and has no value.
        slope_H: ALiBi's slopes in fp32, which are multiplied by the distance and subtracted from the logits. The slots
            must hold all keys of their texts.

    Returns:
        [B, H, Q, D].
    """
    if q_BHQD.is_cuda and q_BHQD.dtype != torch.float64:
        # imports triton, which not every machine has
        from sbeval.models.kernels.slots import kernel_softmax_decode

        q_BHQD = q_BHQD if q_BHQD.stride(-1) == 1 else q_BHQD.contiguous()
        return kernel_softmax_decode(q_BHQD, k_BGKD, v_BGKD, length_B, scale, sink_H=sink_H, slope_H=slope_H)
    groups = k_BGKD.shape[1]
    queries = q_BHQD.shape[2]
    longest = int(length_B.max())
    last_BQ1 = length_B[:, None, None] - torch.arange(queries, 0, -1, device=length_B.device)[:, None]
    visible_BQK = torch.arange(longest, device=length_B.device) <= last_BQ1
    # query heads that share a key head are rows of one matmul, so that keys are not copied
    q_BGRD = q_BHQD.reshape(len(q_BHQD), groups, -1, q_BHQD.shape[3])
    mask_BGRK = visible_BQK.repeat(1, q_BGRD.shape[2] // queries, 1)[:, None]
    k_BGKD, v_BGKD = k_BGKD[:, :, :longest], v_BGKD[:, :, :longest]
    if slope_H is not None:
        distance_BQK = last_BQ1 - torch.arange(longest, device=length_B.device)
        bias_BHQK = alibi(slope_H, distance_BQK).masked_fill(~visible_BQK[:, None], -torch.inf)
        mask_BGRK = bias_BHQK.to(q_BHQD.dtype).reshape(len(q_BHQD), groups, -1, longest)
    if sink_H is not None:  # as one more key, with a zero key vector and the sink as its bias
        logit_1GR1 = sink_H.to(q_BHQD.dtype).repeat_interleave(queries).view(1, groups, -1, 1)
        bias_BGRK = mask_BGRK if slope_H is not None else torch.where(mask_BGRK, 0.0, -torch.inf)
        bias_BGRK = bias_BGRK.to(q_BHQD.dtype).expand(-1, groups, -1, -1)
        mask_BGRK = torch.cat([bias_BGRK, logit_1GR1.expand(len(q_BHQD), -1, -1, -1)], dim=3)
        k_BGKD, v_BGKD = (pad(x, (0, 0, 0, 1)) for x in (k_BGKD, v_BGKD))
    output_BGRD = scaled_dot_product_attention(q_BGRD, k_BGKD, v_BGKD, attn_mask=mask_BGRK, scale=scale)
    return output_BGRD.reshape(*q_BHQD.shape[:3], v_BGKD.shape[3])


def _after_earlier(room_BGKD: Tensor, new_NGQD: Tensor, filling: Filling) -> Tensor:
    """Returns the slots' earlier keys (with a window, those still stored) followed by the new ones, [N, G, both, D]."""
    room = room_BGKD.shape[2]
    place_K = torch.arange(max(0, filling.begin - room), filling.begin, device=room_BGKD.device) % room
    earlier_NKGD = room_BGKD.transpose(1, 2)[filling.slots_N[:, None], place_K]
    return torch.cat([earlier_NKGD.transpose(1, 2), new_NGQD], dim=2)


def _fill(room_BGKD: Tensor, new_NGQD: Tensor, filling: Filling) -> None:
    begin = filling.begin
    room = room_BGKD.shape[2]
    end = filling.begin + new_NGQD.shape[2]
    if end <= room:
        room_BGKD[filling.slots_N, :, begin:end] = new_NGQD
        return
    # each place of the ring buffer keeps the newest position that maps to it, which may be one of an earlier chunk
    newest_N1 = filling.length_N.clamp_max(end)[:, None] - 1
    place_K = torch.arange(room, device=newest_N1.device)
    index_NK = newest_N1 - (newest_N1 - place_K) % room - begin
    source_BGKD = index_NK.clamp_min(0)[:, None, :, None].expand(-1, new_NGQD.shape[1], -1, new_NGQD.shape[3])
    is_new = (index_NK >= 0)[:, None, :, None]
    room_BGKD[filling.slots_N] = torch.where(is_new, new_NGQD.gather(2, source_BGKD), room_BGKD[filling.slots_N])


def _write(k_BGKD: Tensor, v_BGKD: Tensor, new_k_BGQD: Tensor, new_v_BGQD: Tensor, position_B: Tensor) -> None:
    if k_BGKD.is_cuda and k_BGKD.dtype != torch.float64:
        from sbeval.models.kernels.slots import kernel_write  # imports triton, which not every machine has

        kernel_write(k_BGKD, v_BGKD, new_k_BGQD, new_v_BGQD, position_B)
        return
    slot_B = torch.arange(len(k_BGKD), device=k_BGKD.device)
    for query in range(new_k_BGQD.shape[2]):
        place_B = (position_B.long() + query) % k_BGKD.shape[2]
        k_BGKD[slot_B, :, place_B] = new_k_BGQD[:, :, query]
        v_BGKD[slot_B, :, place_B] = new_v_BGQD[:, :, query]
