"""Where the tokens of a forward pass are; of padding, the decoder knows that on the left and nothing else.

Shape suffixes: B batch, Q new positions, D head_dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sbeval.errors import UserError
from sbeval.models.extrapolation import ExtrapolatedAttention


class Positions(NamedTuple):
    """Where the new positions of a forward pass are (a tuple, so that accelerate can move it between devices).

    Attributes:
        position_ids: [B or 1, Q] index of each new token in its own text.
        seq_start: [B] index of the first key that is no padding, or None without padding.
        cos_sin: RoPE's cosine and sine, [B or 1, 1, Q, D / 2] each, or None.
        cu_seqlens: int32 [n + 1], where each of n texts packed into one row begins, or None.
        packed_lengths: the same as numbers, n of them, for what runs text by text.
        extrapolated: rotates and attends in the place of layers with RoPE; there is no `cos_sin` beside it.
    """

    position_ids: Tensor
    seq_start: Tensor | None
    cos_sin: tuple[Tensor, Tensor] | None
    cu_seqlens: Tensor | None = None
    packed_lengths: tuple[int, ...] | None = None
    extrapolated: ExtrapolatedAttention | None = None

    def cached_from(self, first_key: int) -> Tensor | None:
        """`seq_start` counted from the first key a cache still holds."""
        return None if self.seq_start is None else (self.seq_start - first_key).clamp_min(0)


def sequence_starts(attention_mask: Tensor | None, *, keys: int, has_past: bool) -> Tensor | None:
    """Returns how many padding positions precede each sequence, [B] integers, or None where nothing is padded.

    Positions of padding after a sequence need no mask under causal attention, so long as nothing follows them. The mask
    is [B, keys], nonzero for tokens; `keys` are the cached and new positions.

    Raises:
        UserError: the mask has another shape, has a hole, or pads on the right where more tokens follow.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] != keys:
        raise UserError(
            f"attention_mask must have the shape [batch, cached and new tokens = {keys}], "
            f"got {list(attention_mask.shape)}"
        )
    token = attention_mask.bool()
    if bool(token.all()):
        return None
    position = torch.arange(keys, device=token.device)
    start = torch.where(token, position, keys).amin(-1)
    stop = torch.where(token, position + 1, 0).amax(-1)
    if bool((token.sum(-1) != (stop - start).clamp_min(0)).any()):
        raise UserError("attention_mask has padding inside a sequence; pad on the left (padding_side='left')")
    if has_past and bool((stop != keys).any()):
        raise UserError("attention_mask pads on the right of cached tokens; pad on the left (padding_side='left')")
    start = start.clamp_max(keys - 1)
    return start if bool(start.any()) else None
