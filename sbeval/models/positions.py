"""Positions of the tokens of a forward pass: position ids, padding on the left, packed texts, rotary angles.

Shape suffixes: B batch, Q new positions, D head_dim.
"""

from typing import NamedTuple

from torch import Tensor

from sbeval.models.extrapolation import ExtrapolatedAttention


class Positions(NamedTuple):
    """Positions of a forward pass's new tokens; a tuple, so that accelerate can move it between devices.

    Attributes:
        position_ids: [B or 1, Q] index of each new token in its own text.
        seq_start: [B] index of the first key that is not padding, or None without padding.
        cos_sin: cosine and sine tables of RoPE, [B or 1, 1, Q, D / 2] each, or None.
        cu_seqlens: int32 [n + 1], start of each of n texts packed into one row, and their total length; or None.
        packed_lengths: lengths of the n packed texts in tokens, as Python integers; or None.
        extrapolated: attention that replaces the usual rotation and attention of RoPE layers (`cos_sin` is then None).
    """

    position_ids: Tensor
    seq_start: Tensor | None
    cos_sin: tuple[Tensor, Tensor] | None
    cu_seqlens: Tensor | None = None
    packed_lengths: tuple[int, ...] | None = None
    extrapolated: ExtrapolatedAttention | None = None

    def seq_start_from(self, first_key: int) -> Tensor | None:
        """Returns `seq_start` relative to `first_key`, the index of the first key that a cache still holds."""
        return None if self.seq_start is None else (self.seq_start - first_key).clamp_min(0)
