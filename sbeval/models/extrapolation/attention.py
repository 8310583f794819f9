"""Attention whose queries and keys are rotated for each zone of a method: no tensor of all pairs is ever held.

FlexAttention takes one call a zone, put together by their log-sum-exps; elsewhere blocks of rows see all zones at once.

Shape suffixes: B batch, H query heads, G key/value heads, L positions, N query heads of a key head, Q queries, K keys,
D head_dim, R rows of a block, C keys a block has in a zone.
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
"""From a zone to the queries [B, H, L, D] and keys [B, G, L, D] rotated for it."""


WithSums = Callable[..., tuple[Tensor, Tensor]]
"""As `flex_with_sums`."""


class ExtrapolatedAttention(NamedTuple):
    """Causal softmax attention of a method: a tuple, so that accelerate can move it between devices.

    `angle_dtype` is that of cosine and sine; None keeps them in fp32, as this family has them.
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
        """Returns [B, H, Q, D]; the queries are the last Q of the K positions, and neither they nor keys are rotated.

        `seq_start_B` is the first key that is no padding; the outputs of rows before it mean nothing. `lengths`
        are the tokens of each of several texts in one row, which do not see each other.
        """
        if lengths is not None and len(lengths) > 1:
            texts = zip(*(torch.split(x, list(lengths), dim=2) for x in heads), strict=True)
            return torch.cat([self(*text, scale=scale) for text in texts], dim=2)
        q_BHQD, k_BGKD, v_BGKD = heads
        queries, keys = q_BHQD.shape[2], k_BGKD.shape[2]
        # on the CPU, so that nobody waits for a GPU to know which keys a block of rows has
        position_BK = torch.arange(keys)[None]
        if seq_start_B is not None:
            position_BK = position_BK - seq_start_B.cpu()[:, None]
        position_BQ = position_BK[:, keys - queries :]
        if (factor_BQ := self.method.temperature(position_BQ)) is not None:
            q_BHQD = (q_BHQD * factor_BQ.to(q_BHQD.device)[:, None, :, None]).to(q_BHQD.dtype)
        turned: dict[OfPosition, Tensor] = {}

        def rotated(zone: Zone) -> tuple[Tensor, Tensor]:
            if zone.key not in turned:  # zones may share their keys
                turned[zone.key] = self._rotated(k_BGKD, zone.key(position_BK))
            return self._rotated(q_BHQD, zone.query(position_BQ)), turned[zone.key]

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
    """Returns [B, H, Q, D] block by block of rows: in each, one softmax over the keys of all zones.

    `zones` are given with their queries and keys; positions are int64 on the CPU.
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
        position_BR = position_BQ[:, top : top + rows].clamp_min(0)  # padding sees a key too, or it would be NaN
        logits = []
        seen = []
        columns = []
        for zone, q_BHQD, k_BGKD in zones:
            first_BR = zone.first(position_BR)
            stop_BR = zone.stop(position_BR)
            some_BR = first_BR < stop_BR
            if not bool(some_BR.any()):
                continue
            # the keys that any row has, by their places in the batch
            low = int((first_BR + start_B1)[some_BR].min())
            high = int((stop_BR + start_B1)[some_BR].max())
            own_BC = position_BK[:, low:high].to(device)[:, None]
            first_BR1, stop_BR1 = (x.to(device)[..., None] for x in (first_BR, stop_BR))
            seen.append((own_BC >= first_BR1) & (own_BC < stop_BR1))
            columns.append(slice(low, high))
            q_BGMD = q_BHQD[:, :, top : top + rows].reshape(batch, groups, -1, size)  # M: rows of all heads of a group
            logits.append(scale * (q_BGMD.to(wide) @ k_BGKD[:, :, low:high].to(wide).mT))
        seen_BRC = torch.cat(seen, dim=-1)
        logits_BGMC = torch.cat(logits, dim=-1)
        logits_BGNRC = logits_BGMC.view(batch, groups, heads // groups, -1, logits_BGMC.shape[-1])
        weights = logits_BGNRC.masked_fill(~seen_BRC[:, None, None], -torch.inf).softmax(-1).flatten(2, 3)
        shares = torch.split(weights, [place.stop - place.start for place in columns], dim=-1)
        mixed = [share @ v_BGKD[:, :, place].to(wide) for share, place in zip(shares, columns, strict=True)]
        outputs.append(torch.stack(mixed).sum(0).view(batch, heads, -1, size).to(v_BGKD.dtype))
    return torch.cat(outputs, dim=2)


def zone_blocks(first_Q: Tensor, stop_Q: Tensor) -> BlockMask:
    """Which blocks of 128 x 128 pairs hold keys from `first` to before `stop` (int32), in full or in part."""
    first = first_Q.view(-1, flex.BLOCK_TOKENS)
    stop = stop_Q.view(-1, flex.BLOCK_TOKENS)
    begin = torch.arange(0, len(first_Q), flex.BLOCK_TOKENS, device=first_Q.device)
    full = (first.amax(1)[:, None] <= begin) & (stop.amin(1)[:, None] >= begin + flex.BLOCK_TOKENS)
    some = (first.amin(1)[:, None] < begin + flex.BLOCK_TOKENS) & (stop.amax(1)[:, None] > begin)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_Q[query]) & (key < stop_Q[query])

    return flex.mask_of_blocks(len(first_Q), seen, flex.listed_blocks(some & ~full), flex.listed_blocks(full))


@functools.lru_cache(maxsize=2)
def _blocks(method: Extrapolation, length: int, device: torch.device) -> tuple[BlockMask, ...]:
    position_Q = torch.arange(length, device=device)
    return tuple(zone_blocks(zone.first(position_Q).int(), zone.stop(position_Q).int()) for zone in method.zones)


def flex_with_sums(
    q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, block_mask: BlockMask, scale: float, enable_gqa: bool
) -> tuple[Tensor, Tensor]:
    """FlexAttention of a length of whole blocks, with the log-sum-exp [B, H, L] of each query's logits."""
    options: Any = {"IS_DIVISIBLE": True}  # which it cannot find out for a length of any number
    heads = (q_BHLD, k_BGLD, v_BGLD)
    sums = AuxRequest(lse=True)
    output, others = flex_attention(
        *heads, None, block_mask, scale, enable_gqa, kernel_options=options, return_aux=sums
    )
    assert others.lse is not None
    return output, others.lse


def flex_extrapolated(
    method: Extrapolation, rotated: Rotated, v_BGLD: Tensor, *, scale: float, attention: WithSums | None = None
) -> Tensor:
    """Returns [B, H, L, D] of a whole text without padding.

    `attention` is `flex_with_sums` compiled; None takes it as it is, which holds all pairs.
    """
    length = v_BGLD.shape[2]
    added = flex.whole_blocks(length) - length

    def filled(x_BHLD: Tensor) -> Tensor:
        # no views, and always in one order of memory: for any other, a kernel would be compiled anew
        return (pad(x_BHLD, (0, 0, 0, added)) if added else x_BHLD).contiguous().detach()

    v_BGLD = filled(v_BGLD)
    outputs, sums = [], []
    for zone, block_mask in zip(method.zones, _blocks(method, length + added, v_BGLD.device), strict=True):
        q_BHLD, k_BGLD = map(filled, rotated(zone))
        grouped = q_BHLD.shape[1] != k_BGLD.shape[1]
        output, sum_BHL = (attention or flex_with_sums)(q_BHLD, k_BGLD, v_BGLD, block_mask, scale, grouped)
        outputs.append(output[:, :, :length])
        sums.append(sum_BHL[:, :, :length].float())
    share_PBHL = torch.stack(sums).softmax(dim=0)
    # a query without keys in a zone has a share of 0 there
    mixed = sum(output * share[..., None] for output, share in zip(outputs, share_PBHL, strict=True))
    assert isinstance(mixed, Tensor)
    return mixed.to(v_BGLD.dtype)


_ZONES = OptionalKernel("PyTorch's FlexAttention", flex.BLOCKS_OF_ROWS)


def compiled_zones(method: Extrapolation, rotated: Rotated, v_BGLD: Tensor, *, scale: float) -> Tensor | None:
    """Takes what `flex_extrapolated` takes; returns [B, H, L, D], or None where it cannot be compiled."""
    options: dict[str, Any] = {"scale": scale, "attention": flex.compiled_once(flex_with_sums)}
    return _ZONES.attempt(lambda: flex_extrapolated(method, rotated, v_BGLD, **options))
