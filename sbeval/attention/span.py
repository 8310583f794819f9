"""Measures how far back stick-breaking attention looks, without storing its weights.

A number of newest keys together take 1 - exp(-spent) of a query's stick, the total weight of 1; `spent` is the sum of
softplus(logit) over these keys. So they hold a certain share of all weight once `spent` passes a bound, which follows
from the remainder. A first pass over the keys computes the remainder; a second pass visits only the tiles in which a
row passes its bound.

Shape suffixes: n a range of batch times key/value heads, R rows of a block, J keys of a tile, X shares; the others as
in `impl.tiles`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sbeval.attention.api import check_inputs
from sbeval.attention.impl.tiles import RowBlock, Tiles, in_threads, log_of_least_stick, spent


class EffectiveSpan(NamedTuple):
    """The number of newest keys that together hold certain shares of each query's attention weight.

    Attributes:
        spans: fp32 [B, H, Q, shares] in keys, NaN for a query that gave no weight to any key.
        remainder: [B, H, Q] in fp32 (fp64 for fp64 inputs): one minus the sum of each query's weights.
    """

    spans: Tensor
    remainder: Tensor


@torch.no_grad()
def effective_span(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    attend_current: bool = False,
    seq_start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    levels: Sequence[float] = (0.5, 0.9, 0.99),
) -> EffectiveSpan:
    """Counts, for each query, how many of the newest keys together hold certain shares of its attention weight.

    The share is relative to the query's total weight, 1 - remainder. The arguments are those of
    `sbeval.stickbreaking_attention`. Sums are in fp32 or wider. Needs O(L) memory and runs on any device. `levels` are
    the shares, each between 0 and 1.

    Returns:
        `EffectiveSpan(spans, remainder)`; not differentiable.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a level does not lie between 0 and 1.
    """
    check_inputs(q, k, k, seq_start, cu_seqlens, None)
    if not levels or not all(0 < level < 1 for level in levels):
        raise ValueError(f"levels must be shares between 0 and 1, got {list(levels)}")
    tiles = Tiles.of(q, k, q.shape[-1] ** -0.5 if scale is None else scale, attend_current, seq_start, cu_seqlens)
    spans_NSQX = tiles.q_NSQD.new_full((*tiles.q_NSQD.shape[:3], len(levels)), torch.nan, dtype=torch.float32)
    remainder_NSQ = tiles.q_NSQD.new_empty(tiles.q_NSQD.shape[:3])

    def work(block: RowBlock) -> None:
        spans_nRX, spent_nR = _row_block_spans(tiles, block, levels)
        tiles.put(spans_NSQX, block, spans_nRX)
        tiles.put(remainder_NSQ, block, (-spent_nR).exp())

    in_threads(work, tiles.row_blocks, q.device)
    return EffectiveSpan(spans_NSQX.view(*q.shape[:3], len(levels)), remainder_NSQ.view(q.shape[:3]))


def _row_block_spans(tiles: Tiles, block: RowBlock, levels: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Returns spans fp32 [n, R, X] and minus the log of the remainder, fp64 [n, R]."""
    q_nRD = tiles.rows(tiles.q_NSQD, block)
    least = log_of_least_stick(None, q_nRD)
    spent_nR = q_nRD.new_zeros(q_nRD.shape[:2], dtype=torch.float64)
    walk = tiles.key_tiles(block)
    spent_before: list[Tensor] = []
    for tile in walk:
        if least is not None and not (spent_nR <= -least).any():
            break
        spent_before.append(spent_nR)
        spent_nR = spent_nR + spent(tiles.logits(q_nRD, block, tile)).sum(-1)
    share_X = torch.tensor(levels, dtype=torch.float64, device=q_nRD.device)
    # tolerance for rounding: of two equal weights, the first must reach a share of one half
    slack = 1 - 4 * torch.finfo(q_nRD.dtype).eps
    bound_nRX = -torch.log1p(share_X * torch.expm1(-spent_nR)[..., None]) * slack
    span_of_share_nRX = torch.full_like(bound_nRX, torch.nan, dtype=torch.float32)
    # index of the newest key that each row sees, in keys stored newest first
    last = tiles.q_NSQD.shape[2] - 1 + (0 if tiles.attend_current else 1)
    place_Q = last - torch.arange(block.queries.start, block.queries.stop, device=q_nRD.device)
    newest_R = place_Q.repeat(tiles.q_NSQD.shape[1])
    for tile, before_nR, after_nR in zip(walk, spent_before, [*spent_before[1:], spent_nR], strict=False):
        passes_nRX = (before_nR[..., None] < bound_nRX) & (bound_nRX <= after_nR[..., None])
        if q_nRD.device.type == "cpu" and not passes_nRX.any():
            continue
        through_nRJ = spent(tiles.logits(q_nRD, block, tile)).cumsum_(-1)
        missing_nRX = (bound_nRX - before_nR[..., None]).to(through_nRJ.dtype)
        place_nRX = torch.searchsorted(through_nRJ, missing_nRX).clamp_(max=tile.stop - tile.start - 1)
        span_nRX = place_nRX + (tile.start + 1 - newest_R[:, None])
        span_of_share_nRX = torch.where(passes_nRX, span_nRX.to(torch.float32), span_of_share_nRX)
    return span_of_share_nRX, spent_nR
