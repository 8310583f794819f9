"""Forgetting attention over a whole text by FlexAttention, which computes the bias and skips forgotten blocks of keys.

A block of keys is forgotten if the forget gates bound its weight below a threshold, whatever its keys are.

Adaptive computation pruning (Lin et al. 2025, arXiv 2504.06949) bounds every logit by the largest norms of the text's
queries and keys. Here the bound uses the norms of the two blocks. The logit s_j of query j and its own key, whose bias
is 0, is a lower bound of the query's log-sum-exp. So the keys of blocks 0 to c have at most the share

    sum over blocks of n exp(scale max|q| max|k| + S_j - S_i - s_j)

of the weight of query j, where i is the newest of a block's n keys. Blocks 0 to c are skipped if this share is at most
half the threshold for all queries of a block. Outputs then change by at most the threshold times the largest value.

Shape suffixes: B batch, H query heads, G key/value heads, L positions, D head_dim, R blocks of queries, C blocks of
keys, or channels: D plus the extra ones for the forget gates.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from sbeval.models.flex import BLOCK_TOKENS, ScoreMod, compiled_flex_attention, mask_of_blocks, suits_flex, whole_blocks
from sbeval.models.forgetting.layer import sums_in

LARGEST_MASK = 1 << 27
"""Limit on pairs of blocks over all heads (about 16 bytes each); with more pairs, no block is skipped."""


def oldest_blocks(q_BHLD: Tensor, k_BGLD: Tensor, sums_BHL: Tensor, *, scale: float, threshold: float) -> Tensor | None:
    """Finds the oldest block of keys that each block of queries needs, [B, H, R]; None if all are needed.

    `threshold` is the largest allowed change of an output, as a share of the largest value. `sums_BHL` are sums of log
    gates, which never rise with the position.
    """
    length = q_BHLD.shape[2]
    blocks = -(-length // BLOCK_TOKENS)
    if threshold <= 0 or blocks < 2 or sums_BHL.shape[0] * sums_BHL.shape[1] * blocks**2 > LARGEST_MASK:
        return None

    def by_block(x_BHL: Tensor, fill: float) -> Tensor:
        padded = pad(x_BHL, (0, blocks * BLOCK_TOKENS - length), value=fill)
        return padded.view(*x_BHL.shape[:-1], blocks, BLOCK_TOKENS)

    q_BHLD, k_BHLD = q_BHLD.float(), k_BGLD.float().repeat_interleave(q_BHLD.shape[1] // k_BGLD.shape[1], 1)
    query_BHR, key_BHC = (by_block(x.norm(dim=-1), 0.0).amax(-1) for x in (q_BHLD, k_BHLD))
    own_BHR = by_block(scale * (q_BHLD * k_BHLD).sum(-1), torch.inf).amin(-1)
    sums_BHRN = by_block(sums_BHL, -torch.inf)
    # the bias S_j - S_i is largest for the first query of a block of queries and the last key of a block of keys
    newest_BHC = sums_BHL[..., [min(length, (block + 1) * BLOCK_TOKENS) - 1 for block in range(blocks)]]
    log_share_BHRC = (
        math.log(BLOCK_TOKENS)
        + abs(scale) * query_BHR[..., None] * key_BHC[..., None, :]
        + (sums_BHRN[..., 0] - own_BHR)[..., None]
        - newest_BHC[..., None, :]
    )
    is_skipped_BHRC = log_share_BHRC.logcumsumexp(-1) <= math.log(threshold / 2)
    index = torch.arange(blocks, device=q_BHLD.device)
    return (is_skipped_BHRC & (index < index[:, None])).sum(-1)


def blocks_from(oldest_BHR: Tensor, length: int) -> BlockMask:
    """Returns the mask, in blocks of 128 x 128, of the blocks of keys from the oldest needed one to the query's block.

    `length` is a multiple of 128.
    """
    blocks = oldest_BHR.shape[2]
    index = torch.arange(blocks, device=oldest_BHR.device)
    full_BHR = (index - oldest_BHR).to(torch.int32)
    full_BHRC = (oldest_BHR[..., None] + index).clamp_max(blocks - 1).to(torch.int32)
    own_BHRC = ((index[:, None] + index) % blocks).to(torch.int32).expand(full_BHRC.shape).contiguous()

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return mask_of_blocks(length, seen, (torch.ones_like(full_BHR), own_BHRC), (full_BHR, full_BHRC))


def whole_text_attention(
    q_BHLC: Tensor,
    k_BGLC: Tensor,
    v_BGLC: Tensor,
    *,
    head_dim: int,
    scale: float,
    sliding_window: int | None,
    skip_threshold: float | None,
) -> Tensor | None:
    """Computes forgetting attention over texts without padding, [B, H, L, D].

    Args:
        q_BHLC: queries from `with_decay`.
        k_BGLC: keys from `with_decay`.
        v_BGLC: values from `with_decay`.
        head_dim: number of channels before the extra ones.
        scale: factor of the logits.
        sliding_window: number of newest keys that a query sees; with a window, no blocks are skipped.
        skip_threshold: largest change of an output by skipped keys, as a share of the largest value; None skips no
            keys.

    Returns:
        The output, or None if another implementation is faster or FlexAttention does not compile.
    """
    q_BHLD, k_BGLD, v_BGLD = (x[..., :head_dim] for x in (q_BHLC, k_BGLC, v_BGLC))
    if not suits_flex(q_BHLD, k_BGLD, v_BGLD, k_BGLC):
        return None
    length = q_BHLD.shape[2]
    sums_BHL = sums_in(k_BGLC, head_dim, q_BHLD.shape[1] // k_BGLD.shape[1], scale).contiguous()
    options: dict[str, Any] = {"scale": scale, "sliding_window": sliding_window or length}
    if skip_threshold and (sliding_window is None or sliding_window >= length):
        oldest_BHR = oldest_blocks(q_BHLD, k_BGLD, sums_BHL, scale=scale, threshold=skip_threshold)
        options["block_mask"] = None if oldest_BHR is None else blocks_from(oldest_BHR, whole_blocks(length))
    return compiled_flex_attention(q_BHLD, k_BGLD, v_BGLD, score_mod=decay_score_mod(sums_BHL), **options)


def decay_score_mod(sums_BHL: Tensor) -> ScoreMod:
    """Returns the bias of the forget gates as a FlexAttention `score_mod`, computed in fp32."""
    length = sums_BHL.shape[2]
    sums_BHL = pad(sums_BHL, (0, whole_blocks(length) - length))

    def add(logit: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return logit + (sums_BHL[batch, head, query] - sums_BHL[batch, head, key])

    return add
