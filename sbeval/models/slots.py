"""Keys and values of texts that grow side by side: one slot of fixed size for each text, with lengths on the device.

A prompt is written from the beginning of its slot, without padding before it, and every step writes a few positions
more. No number that a step needs lies on the host, so a CUDA graph can replay it.

Shape suffixes: B slots, N texts that are being filled in, H query heads, G key/value heads, K room for keys, Q
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

MOST_QUERIES = 64
"""Most queries to a key head in a step: query heads that share it, times new positions."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Filling:
    """Prompts that are being read into slots (int64), the tokens of each (int64), and the first position read."""

    slots_N: Tensor
    length_N: Tensor
    begin: int


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, [B, G, K, D] each.

    A position sees, and the layer keeps, the newest `sliding_window` keys; None means all.
    """

    is_compileable = True
    keys: Tensor
    values: Tensor

    def __init__(self, of: "SlotCache", sliding_window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of = weakref.proxy(of)  # a reference cycle would free the memory late
        self.is_sliding = sliding_window is not None
        self.room_tokens = min(of.room_tokens, sliding_window or of.room_tokens)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocates memory, shaped after the first keys and values."""

        def room(new: Tensor) -> Tensor:
            # zeros: places beyond a text are read with no weight, so they must be finite
            return new.new_zeros((self._of.slots, new.shape[1], self.room_tokens, new.shape[3]))

        self.keys, self.values = room(key_states), room(value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes [N, G, Q, D] of prompts or [B, G, Q, D] of a step, and returns what those positions attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if (filling := self._of.filling) is not None:
            both = (self.keys, key_states), (self.values, value_states)
            seen_k, seen_v = (new if filling.begin == 0 else _after_earlier(room, new, filling) for room, new in both)
            for room, new in both:
                _fill(room, new, filling)
            return seen_k, seen_v
        _write(self.keys, self.values, key_states, value_states, self._of.position_B)
        return self.attended()

    def attended(self) -> tuple[Tensor, Tensor]:
        """Returns the room that a step attends to; the first `SlotCache.length_B` places of it are filled."""
        self._of.length_B = self._of.lengths_B[self.room_tokens]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """How many positions of a prompt were read before; 0 in a step, whose positions the model is given."""
        return 0 if self._of.filling is None else self._of.filling.begin

    def get_mask_sizes(self, query_length: int, *_: Any) -> tuple[int, int]:
        """How many keys a prompt's mask has, and which is the first."""
        begin = self.get_seq_length()
        earlier = min(begin, self.room_tokens)
        return earlier + int(query_length), begin - earlier

    def get_max_length(self) -> int:
        """Room for keys, in tokens."""
        return self.room_tokens

    get_max_cache_shape = get_max_length  # its name in transformers before 5.20


class SlotCache(Cache):
    """A cache of `slots` texts. Inside `fill` it takes prompts, outside it steps, with equally many positions a slot.

    A text may have `room_tokens` positions; `sliding_windows` are those of the layers, None where all keys are seen.

    Attributes:
        position_B: int32, where the next step writes. Set by the caller.
        lengths_B: int32 [B] for each size of room: how many keys a step attends to, set by `begin_step`.
        length_B: those of the layer updated last.
        filling: the prompts that are being read, None outside `fill`.
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
        """Inside it, the model reads prompts padded on the right, and their keys are written into these slots.

        The arguments are those of `Filling`; positions before `begin` are in the slots.
        """
        self.filling = Filling(slots_N=slots_N, length_N=length_N, begin=begin)
        try:
            yield
        finally:
            self.filling = None

    def clear(self, slots_N: Tensor) -> None:
        """Forgets what earlier texts left in slots, whose NaN would be read with no weight and still count."""
        layers: list[Any] = self.layers
        for layer in layers:
            # kernels do not read beyond a text
            if layer.is_initialized and not (layer.keys.is_cuda and layer.keys.dtype != torch.float64):
                layer.keys[slots_N] = layer.values[slots_N] = 0

    def begin_step(self, new: int = 1) -> None:
        """Sets the lengths, which include the step's positions."""
        seen_B = self.position_B + new
        # kernels that start before the previous one has ended read lengths, so all are computed here
        self.lengths_B = {room: seen_B.clamp_max(room) for room in self._rooms}


def softmax_decode(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, length_B: Tensor, *, scale: float, sink_H: Tensor | None = None
) -> Tensor:
    """Returns [B, H, Q, D]: softmax attention of each slot's newest positions to all its keys.

    `length_B` is how many keys each slot holds, including the queries' own; at least Q. `sink_H` is a logit of each
    head that takes weight and has no value.
    """
    if q_BHQD.is_cuda and q_BHQD.dtype != torch.float64:
        # triton, which runs on a GPU and is not on every machine
        from sbeval.models.kernels.slots import kernel_softmax_decode

        q_BHQD = q_BHQD if q_BHQD.stride(-1) == 1 else q_BHQD.contiguous()
        return kernel_softmax_decode(q_BHQD, k_BGKD, v_BGKD, length_B, scale, sink_H=sink_H)
    groups = k_BGKD.shape[1]
    queries = q_BHQD.shape[2]
    longest = int(length_B.max())
    last_BQ1 = length_B[:, None, None] - torch.arange(queries, 0, -1, device=length_B.device)[:, None]
    seen_BQK = torch.arange(longest, device=length_B.device) <= last_BQ1
    # query heads of one key head are rows of one product: keys are not copied
    q_BGRD = q_BHQD.reshape(len(q_BHQD), groups, -1, q_BHQD.shape[3])
    mask_B1RK = seen_BQK.repeat(1, q_BGRD.shape[2] // queries, 1)[:, None]
    k_BGKD, v_BGKD = k_BGKD[:, :, :longest], v_BGKD[:, :, :longest]
    if sink_H is not None:  # as one more key, of no length
        logit_1GR1 = sink_H.to(q_BHQD.dtype).repeat_interleave(queries).view(1, groups, -1, 1)
        hidden_BGRK = torch.where(mask_B1RK, 0.0, -torch.inf).to(q_BHQD.dtype).expand(-1, groups, -1, -1)
        mask_B1RK = torch.cat([hidden_BGRK, logit_1GR1.expand(len(q_BHQD), -1, -1, -1)], dim=3)
        k_BGKD, v_BGKD = (pad(x, (0, 0, 0, 1)) for x in (k_BGKD, v_BGKD))
    output_BGRD = scaled_dot_product_attention(q_BGRD, k_BGKD, v_BGKD, attn_mask=mask_B1RK, scale=scale)
    return output_BGRD.reshape(*q_BHQD.shape[:3], v_BGKD.shape[3])


def _after_earlier(room_BGKD: Tensor, new_NGQD: Tensor, filling: Filling) -> Tensor:
    """Returns [N, G, earlier and new, D]: all earlier keys of these slots, or those still in a window's ring."""
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
    # each place of a ring holds the newest position that falls on it, which may be an earlier one
    newest_N1 = filling.length_N.clamp_max(end)[:, None] - 1
    place_K = torch.arange(room, device=newest_N1.device)
    index_NK = newest_N1 - (newest_N1 - place_K) % room - begin
    taken = index_NK.clamp_min(0)[:, None, :, None].expand(-1, new_NGQD.shape[1], -1, new_NGQD.shape[3])
    is_new = (index_NK >= 0)[:, None, :, None]
    room_BGKD[filling.slots_N] = torch.where(is_new, new_NGQD.gather(2, taken), room_BGKD[filling.slots_N])


def _write(k_BGKD: Tensor, v_BGKD: Tensor, new_k_BGQD: Tensor, new_v_BGQD: Tensor, position_B: Tensor) -> None:
    if k_BGKD.is_cuda and k_BGKD.dtype != torch.float64:
        from sbeval.models.kernels.slots import kernel_write  # as above

        kernel_write(k_BGKD, v_BGKD, new_k_BGQD, new_v_BGQD, position_B)
        return
    slot_B = torch.arange(len(k_BGKD), device=k_BGKD.device)
    for query in range(new_k_BGQD.shape[2]):
        place_B = (position_B.long() + query) % k_BGKD.shape[2]
        k_BGKD[slot_B, :, place_B] = new_k_BGQD[:, :, query]
        v_BGKD[slot_B, :, place_B] = new_v_BGQD[:, :, query]
