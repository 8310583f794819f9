"""Where the tokens of a forward pass are; of padding, the decoder knows that on the left and nothing else.

Shape suffixes: B batch, Q new positions, D head_dim.
"""

from typing import NamedTuple

from torch import Tensor

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
