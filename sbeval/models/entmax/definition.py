"""Entmax-1.5 and the attention of all schemes with a bias, as their formulas read; tests call it in fp64.

Entmax-1.5 (Peters et al. 2019, arXiv 1905.05702) maps logits s to the weights p_i = max(0, s_i / 2 - tau)^2, where tau
is the number for which they add up to one. Here tau comes from sorted logits, without iterations.

Shape suffixes: B batch, H query heads, G key/value heads, Q queries, K keys, D head_dim.
"""

import torch
from torch import Tensor


def exact_entmax15(logits: Tensor) -> Tensor:
    """Returns the weights [..., K] of logits [..., K]; a logit may be minus infinity, but not all of a row.

    If the k largest values z of a row are those with a weight, tau solves sum (z - tau)^2 = 1: it is their mean minus
    sqrt((1 - k * variance) / k). That is true for one k, the largest with tau <= z_k.
    """
    half = logits / 2
    # tau is at least max z - 1, so lower numbers have no weight; the bound replaces minus infinity
    half = (half - half.amax(-1, keepdim=True)).clamp_min(-2.0)
    sorted_half = half.sort(-1, descending=True).values
    count = torch.arange(1, half.shape[-1] + 1, device=half.device, dtype=half.dtype)
    mean = sorted_half.cumsum(-1) / count
    share = (1 - sorted_half.square().cumsum(-1) + count * mean.square()) / count
    with torch.no_grad():
        last = (mean - share.clamp_min(0).sqrt() <= sorted_half).sum(-1, keepdim=True) - 1
    tau = mean.gather(-1, last) - share.gather(-1, last).sqrt()
    return (half - tau).clamp_min(0).square()


def reference_attention(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    seq_start_B: Tensor | None = None,
    slope_H: Tensor | None = None,
    entmax: bool = True,
) -> Tensor:
    """Computes causal attention from all logits at once, [B, H, Q, D]; the queries are the last Q of the K positions.

    Args:
        q_BHQD: queries.
        k_BGKD: keys.
        v_BGKD: values.
        scale: factor of the logits.
        sliding_window: query j attends only to keys i with j - i < window; None means all earlier keys.
        seq_start_B: index of the first key that is not padding; queries before it attend only to themselves.
        slope_H: slope of each head, which is multiplied by the distance and subtracted from the logit; None means 0.
        entmax: weights by entmax-1.5; False means softmax.
    """
    heads, queries, keys = q_BHQD.shape[1], q_BHQD.shape[2], k_BGKD.shape[2]
    k_BHKD, v_BHKD = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k_BGKD, v_BGKD))
    logits_BHQK = scale * (q_BHQD @ k_BHKD.mT)
    key_K = torch.arange(keys, device=q_BHQD.device)
    distance_QK = key_K[keys - queries :, None] - key_K
    if slope_H is not None:
        logits_BHQK = logits_BHQK - slope_H[:, None, None] * distance_QK
    seen = ((distance_QK >= 0) & (distance_QK < (sliding_window or keys)))[None, None]
    if seq_start_B is not None:
        seen = seen & ((key_K >= seq_start_B[:, None, None, None]) | (distance_QK == 0))
    logits_BHQK = logits_BHQK.masked_fill(~seen, -torch.inf)
    weights_BHQK = exact_entmax15(logits_BHQK) if entmax else logits_BHQK.softmax(-1)
    return weights_BHQK @ v_BHKD
