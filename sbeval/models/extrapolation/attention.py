"""Attention with queries and keys rotated separately for each zone (set of query-key pairs) of a method.

With FlexAttention, there is one call for each zone, and the outputs are merged by their log-sum-exps. Otherwise
attention runs in blocks of rows, each with one softmax over the keys of all zones. Neither materialises all pairs.

Shape suffixes: B batch, H query heads, G key/value heads, L positions, N query heads of a key head, Q queries, K keys,
D head_dim, R rows of a block, C keys of a block in a zone, P zones.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from sbeval.models import flex
from sbeval.models.extrapolation.methods import Extrapolation, OfPosition, Zone
from sbeval.models.kernels.devices import OptionalKernel
from sbeval.models.rope import RopeFrequencies, cos_sin, rotate
from sbeval.models.softmax import MASK_ELEMENTS, softmax_attention

Rotated = Callable[[Zone], tuple[Tensor, Tensor]]
"""Takes a zone and returns the queries [B, H, L, D] and keys [B, G, L, D] rotated for it."""


WithSums = Callable[..., tuple[Tensor, Tensor]]
"""A function with the signature of `flex_with_sums`."""


class ExtrapolatedAttention(NamedTuple):
    """Causal softmax attention with an extrapolation method; a tuple, so that accelerate can move it between devices.

    Attributes:
        method: the method, which maps positions to those by which queries and keys are rotated.
        frequencies: RoPE frequencies.
        angle_dtype: dtype of the cosine and sine tables; None means fp32, as in sbeval models.
    """

    method: Extrapolation
    frequencies: RopeFrequencies
    angle_dtype: torch.dtype | None = None

    def __call__(
        self,
        *heads: Tensor,
        scale: float,
        seq_start_B: Tensor | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Computes attention, [B, H, Q, D]; the queries are the last Q of the K positions.

        Args:
            heads: unrotated queries [B, H, Q, D], and keys and values [B, G, K, D].
            scale: factor of the logits.
            seq_start_B: index of the first key that is not padding; outputs before it are undefined.
            lengths: number of tokens of each of several texts packed into one row, which do not see each other.
        """
        if lengths is not None and len(lengths) > 1:
            texts = zip(*(torch.split(x, list(lengths), dim=2) for x in heads), strict=True)
            return torch.cat([self(*text, scale=scale) for text in texts], dim=2)
        q_BHQD, k_BGKD, v_BGKD = heads
        queries, keys = q_BHQD.shape[2], k_BGKD.shape[2]
        # on the CPU, so that choosing the keys of a block of rows does not synchronise with the GPU
        position_BK = torch.arange(keys)[None]
        if seq_start_B is not None:
            position_BK = position_BK - seq_start_B.cpu()[:, None]
        position_BQ = position_BK[:, keys - queries :]
        if (factor_BQ := self.method.temperature(position_BQ)) is not None:
            q_BHQD = (q_BHQD * factor_BQ.to(q_BHQD.device)[:, None, :, None]).to(q_BHQD.dtype)
        rotated_keys: dict[OfPosition, Tensor] = {}

        def rotated(zone: Zone) -> tuple[Tensor, Tensor]:
            if zone.key not in rotated_keys:  # several zones may rotate the keys in the same way
                rotated_keys[zone.key] = self._rotated(k_BGKD, zone.key(position_BK))
            return self._rotated(q_BHQD, zone.query(position_BQ)), rotated_keys[zone.key]

        zones = self.method.zones
        if len(zones) == 1:
            return softmax_attention(*rotated(zones[0]), v_BGKD, scale=scale, seq_start_B=seq_start_B)
        if seq_start_B is None and flex.suits_flex(q_BHQD, k_BGKD, v_BGKD):
            output_BHQD = compiled_zones(self.method, rotated, v_BGKD, scale=scale)
            if output_BHQD is not None:
                return output_BHQD
        return _in_blocks([(zone, *rotated(zone)) for zone in zones], v_BGKD, position_BQ, position_BK, scale=scale)

    def _rotated(self, x_BHLD: Tensor, position_BL: Tensor) -> Tensor:
        angles = cos_sin(self.frequencies, position_BL.to(x_BHLD.device))
        if self.angle_dtype is not None:
            angles = (angles[0].to(self.angle_dtype), angles[1].to(self.angle_dtype))
        return rotate(x_BHLD, *angles)


def _in_blocks(
    zones: list[tuple[Zone, Tensor, Tensor]], v_BGKD: Tensor, position_BQ: Tensor, position_BK: Tensor, *, scale: float
) -> Tensor:
    """Computes attention in blocks of rows, with one softmax over the keys of all zones, [B, H, Q, D].

    Each of `zones` comes with its rotated queries and keys; positions are int64 on the CPU.
    """
    (batch, heads, queries, size) = zones[0][1].shape
    device = v_BGKD.device
    groups, keys = v_BGKD.shape[1:3]
    budget = MASK_ELEMENTS.get(device.type, MASK_ELEMENTS["cpu"])
    rows = max(1, min(queries, budget // (batch * heads * keys)))
    start_B1 = -position_BK[:, :1]
    wide = torch.promote_types(v_BGKD.dtype, torch.float32)
    outputs = []
    for top in range(0, queries, rows):
        position_BR = position_BQ[:, top : top + rows].clamp_min(0)  # padding attends to a key too, to avoid NaN
        logits, seen, columns = [], [], []
        for zone, q_BHQD, k_BGKD in zones:
            first_BR, stop_BR = zone.first(position_BR), zone.stop(position_BR)
            has_keys_BR = first_BR < stop_BR
            if not bool(has_keys_BR.any()):
                continue
            # range of key indices that covers the keys of all rows
            low = int((first_BR + start_B1)[has_keys_BR].min())
            high = int((stop_BR + start_B1)[has_keys_BR].max())
            position_B1C = position_BK[:, low:high].to(device)[:, None]
            first_BR1, stop_BR1 = (x.to(device)[..., None] for x in (first_BR, stop_BR))
            seen.append((position_B1C >= first_BR1) & (position_B1C < stop_BR1))
            columns.append(slice(low, high))
            q_BGMD = q_BHQD[:, :, top : top + rows].reshape(batch, groups, -1, size)  # M: N * R
            logits.append(scale * (q_BGMD.to(wide) @ k_BGKD[:, :, low:high].to(wide).mT))
        visible_BRC = torch.cat(seen, dim=-1)
        logits_BGMC = torch.cat(logits, dim=-1)
        logits_BGNRC = logits_BGMC.view(batch, groups, heads // groups, -1, logits_BGMC.shape[-1])
        weights = logits_BGNRC.masked_fill(~visible_BRC[:, None, None], -torch.inf).softmax(-1).flatten(2, 3)
        zone_weights = torch.split(weights, [keys_C.stop - keys_C.start for keys_C in columns], dim=-1)
        zone_outputs = [x @ v_BGKD[:, :, keys_C].to(wide) for x, keys_C in zip(zone_weights, columns, strict=True)]
        outputs.append(torch.stack(zone_outputs).sum(0).view(batch, heads, -1, size).to(v_BGKD.dtype))
    return torch.cat(outputs, dim=2)


def zone_blocks(first_Q: Tensor, stop_Q: Tensor) -> BlockMask:
    """Returns the mask, in blocks of 128 x 128, in which query j sees the keys first_Q[j] <= i < stop_Q[j] (int32)."""
    first, stop = first_Q.view(-1, flex.BLOCK_TOKENS), stop_Q.view(-1, flex.BLOCK_TOKENS)
    begin = torch.arange(0, len(first_Q), flex.BLOCK_TOKENS, device=first_Q.device)
    full = (first.amax(1)[:, None] <= begin) & (stop.amin(1)[:, None] >= begin + flex.BLOCK_TOKENS)
    any_visible = (first.amin(1)[:, None] < begin + flex.BLOCK_TOKENS) & (stop.amax(1)[:, None] > begin)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_Q[query]) & (key < stop_Q[query])

    return flex.mask_of_blocks(len(first_Q), seen, flex.listed_blocks(any_visible & ~full), flex.listed_blocks(full))


@functools.lru_cache(maxsize=2)
def _blocks(method: Extrapolation, length: int, device: torch.device) -> tuple[BlockMask, ...]:
    position_Q = torch.arange(length, device=device)
    return tuple(zone_blocks(zone.first(position_Q).int(), zone.stop(position_Q).int()) for zone in method.zones)


def flex_with_sums(
    q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, block_mask: BlockMask, scale: float, enable_gqa: bool
) -> tuple[Tensor, Tensor]:
    """Runs FlexAttention on a length that is a multiple of the block size.

    Returns:
        The output [B, H, L, D], and the log-sum-exp of each query's logits, [B, H, L].
    """
    options: Any = {"IS_DIVISIBLE": True}  # compilation cannot derive these options from a dynamic length
    output, aux = flex_attention(
        q_BHLD,
        k_BGLD,
        v_BGLD,
        None,
        block_mask,
        scale,
        enable_gqa,
        kernel_options=options,
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None
    return output, aux.lse


def flex_extrapolated(
    method: Extrapolation, rotated: Rotated, v_BGLD: Tensor, *, scale: float, attention: WithSums | None = None
) -> Tensor:
    """Computes attention over a whole text without padding by FlexAttention, [B, H, L, D].

    `attention` is compiled `flex_with_sums`; None runs it uncompiled, which materialises all pairs.
    """
    length = v_BGLD.shape[2]
    added = flex.whole_blocks(length) - length

    def padded(x_BHLD: Tensor) -> Tensor:
        # contiguous and no views, since views and other memory layouts would cause recompilations
        return (pad(x_BHLD, (0, 0, 0, added)) if added else x_BHLD).contiguous().detach()

    v_BGLD = padded(v_BGLD)
    outputs, sums = [], []
    for zone, block_mask in zip(method.zones, _blocks(method, length + added, v_BGLD.device), strict=True):
        q_BHLD, k_BGLD = map(padded, rotated(zone))
        grouped = q_BHLD.shape[1] != k_BGLD.shape[1]
        output, sum_BHL = (attention or flex_with_sums)(q_BHLD, k_BGLD, v_BGLD, block_mask, scale, grouped)
        outputs.append(output[:, :, :length])
        sums.append(sum_BHL[:, :, :length].float())
    weight_PBHL = torch.stack(sums).softmax(dim=0)
    # a query without keys in a zone has weight 0 there
    merged = sum(output * weight[..., None] for output, weight in zip(outputs, weight_PBHL, strict=True))
    assert isinstance(merged, Tensor)
    return merged.to(v_BGLD.dtype)


_ZONES = OptionalKernel("PyTorch's FlexAttention", flex.BLOCKS_OF_ROWS)


def compiled_zones(method: Extrapolation, rotated: Rotated, v_BGLD: Tensor, *, scale: float) -> Tensor | None:
    """Runs `flex_extrapolated` compiled, [B, H, L, D]; returns None if it cannot be compiled."""
    options: dict[str, Any] = {"scale": scale, "attention": flex.compiled_once(flex_with_sums)}
    return _ZONES.attempt(lambda: flex_extrapolated(method, rotated, v_BGLD, **options))
