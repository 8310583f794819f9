"""Causal entmax attention in blocks of queries: the logits of one block are materialised, with its bias.

Heads with ALiBi get a window. A key has a weight only if its logit is at most 2 below the query's largest, and logits
without the bias are at most b, the product of the scale and the largest norms of the head's queries and keys. So a key
at distance d has none if b - slope * d < -b - 2, since the query's own key has a logit of at least -b.

Shape suffixes: B batch, H query heads, G key/value heads, M query heads of a key head, Q queries, K keys, D head_dim,
R rows of a block, C keys visible to a block.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sbeval.models.biases import AlibiBias
from sbeval.models.entmax.kernel import adasplash_attention, suits_adasplash
from sbeval.models.entmax.weights import entmax15
from sbeval.models.softmax import Bias, rows_of_a_block

BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 29}
"""Limit on the elements of all fp32 tensors of a block, by device type: 16 MiB, and 2 GiB on a GPU.

A GPU would idle with few rows.
"""
TENSORS_OF_A_BLOCK = 4
"""Number of tensors, each as large as a block's logits, that exist at the peak of a block."""
SHORT_TOKENS = 128
"""Up to this many keys, all heads are computed at once: more launches would cost more than the skipped keys save."""
_WEIGHT_RANGE = 2.0  # in logits: entmax-1.5 gives no weight to a key further below the largest
_ROUNDING_MARGIN = 1.01


def entmax_attention(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    seq_start_B: Tensor | None = None,
    bias: Bias | None = None,
    position_ids_BQ: Tensor | None = None,
) -> Tensor:
    """Computes causal attention with weights by entmax-1.5, [B, H, Q, D]; arguments as in `softmax_attention`.

    On a GPU, `adasplash` computes heads without a bias if it is installed; see the module `kernel`.
    """
    if not isinstance(bias, AlibiBias) or k_BGKD.shape[2] <= SHORT_TOKENS:
        return _attend(q_BHQD, k_BGKD, v_BGKD, scale, sliding_window, seq_start_B, bias, position_ids_BQ)
    groups = k_BGKD.shape[1]
    members = q_BHQD.shape[1] // groups
    outputs = []
    for heads, slopes in _heads_of_one_slope(bias.slopes, members):
        keys = slice(heads.start // members, -(-heads.stop // members))
        q, k, v = q_BHQD[:, heads], k_BGKD[:, keys], v_BGKD[:, keys]
        window, head_bias = sliding_window, None
        if slopes[0]:
            reach = _reach_tokens(q, k, scale, slopes[0])
            window = reach if window is None else min(window, reach)
            head_bias = AlibiBias(len(slopes), slopes)
        outputs.append(_attend(q, k, v, scale, window, seq_start_B, head_bias, position_ids_BQ))
    return torch.cat(outputs, dim=1)


def _heads_of_one_slope(slopes: list[float], members: int) -> Iterator[tuple[slice, list[float]]]:
    """Splits the heads into single heads with a slope, and runs of heads without one that share whole key heads."""
    first = 0
    while first < len(slopes):
        stop = first + 1
        if not slopes[first] and first % members == 0:
            while stop < len(slopes) and not slopes[stop]:
                stop += 1
            stop = max(first + 1, stop - stop % members) if stop - first >= members else first + 1
        yield slice(first, stop), slopes[first:stop]
        first = stop


@torch.no_grad()
def _reach_tokens(q_BHQD: Tensor, k_BGKD: Tensor, scale: float, slope: float) -> int:
    """Returns the smallest window that holds every key with a weight, for heads with this slope of ALiBi."""
    query, key = (x.float().norm(dim=-1).amax() for x in (q_BHQD, k_BGKD))
    bound = abs(scale) * float(query * key)
    reach = _ROUNDING_MARGIN * (2 * bound + _WEIGHT_RANGE) / slope
    # values that are not finite reach the output, where the caller finds them
    return math.floor(reach) + 2 if math.isfinite(reach) else k_BGKD.shape[2]


def _attend(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    scale: float,
    sliding_window: int | None,
    seq_start_B: Tensor | None,
    bias: Bias | None,
    position_ids_BQ: Tensor | None,
) -> Tensor:
    batch, heads, queries, _ = q_BHQD.shape
    keys = k_BGKD.shape[2]
    window = keys if sliding_window is None else min(sliding_window, keys)
    if bias is None and window == keys and seq_start_B is None and suits_adasplash(q_BHQD, k_BGKD, v_BGKD):
        output_BHQD = adasplash_attention(q_BHQD, k_BGKD, v_BGKD, scale=scale)
        if output_BHQD is not None:
            return output_BHQD
    wide = torch.promote_types(q_BHQD.dtype, torch.float32)

    def block(last: int, columns: int, q_BHRD: Tensor, k: Tensor, v: Tensor, position_BR: Tensor | None) -> Tensor:
        rows = q_BHRD.shape[2]
        row_R = torch.arange(last - rows, last, device=q_BHRD.device)
        key_C = torch.arange(last - columns, last, device=q_BHRD.device)
        distance_RC = row_R[:, None] - key_C
        hidden = ((distance_RC < 0) | (distance_RC >= window))[None, None]
        if seq_start_B is not None:
            hidden = hidden | ((key_C < seq_start_B[:, None, None, None]) & (distance_RC != 0))
        k_BGCD, v_BGCD = k[:, :, last - columns : last], v[:, :, last - columns : last]
        # autocast would round the logits
        with torch.autocast(q_BHRD.device.type, enabled=False):
            # query heads that share a key head are rows of one matmul, so that keys are not copied
            q_BGND = q_BHRD.to(wide).reshape(batch, k.shape[1], -1, q_BHRD.shape[3])
            logits_BHRC = (scale * (q_BGND @ k_BGCD.to(wide).mT)).view(batch, heads, rows, columns)
            if bias is not None:
                logits_BHRC = logits_BHRC + bias(row_R[None] if position_BR is None else position_BR, distance_RC)
            weights_BHRC = entmax15(logits_BHRC.masked_fill(hidden, -torch.inf)).to(v.dtype)
            output_BGND = weights_BHRC.view(batch, k.shape[1], -1, columns) @ v_BGCD
        return output_BGND.view(batch, heads, rows, v.shape[3])

    elements = BLOCK_ELEMENTS.get(q_BHQD.device.type, BLOCK_ELEMENTS["cpu"])
    rows = rows_of_a_block(queries, keys, window, elements // (TENSORS_OF_A_BLOCK * batch * heads))
    outputs = []
    # the first block is the shorter one, as in `softmax_attention`
    for stop in range((queries - 1) % rows + 1, queries + 1, rows):
        start = max(0, stop - rows)
        last = keys - queries + stop
        columns = min(last, stop - start + window - 1)
        position_BR = None if position_ids_BQ is None else position_ids_BQ[:, start:stop]
        arguments = (last, columns, q_BHQD[:, :, start:stop], k_BGKD, v_BGKD, position_BR)
        if torch.is_grad_enabled() and rows < queries:
            outputs.append(checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(block(*arguments))
    return torch.cat(outputs, dim=2)


def block_bytes(heads: int, key_heads: int, head_dim: int, tokens: int, device_type: str, *, batch: int = 1) -> int:
    """Returns the bytes that a block needs at its peak: its logits and weights, and the fp32 copy of the keys.

    `tokens` is the number of tokens in all `batch` sequences, which are equally long.
    """
    row = TENSORS_OF_A_BLOCK * heads * tokens
    elements = max(row, min(BLOCK_ELEMENTS[device_type], row * -(-tokens // batch)))
    return torch.float32.itemsize * (elements + key_heads * tokens * head_dim)


def entmax_decode(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, length_B: Tensor, *, scale: float) -> Tensor:
    """Computes entmax attention of a decode step: each slot's newest Q positions attend to the slot's keys.

    Args:
        q_BHQD: queries of the newest positions.
        k_BGKD: keys of the slots.
        v_BGKD: values of the slots.
        length_B: number of valid keys in each slot, including those of the newest positions; at least Q.
        scale: factor of the logits.

    Returns:
        [B, H, Q, D].
    """
    batch, heads, queries, head_dim = q_BHQD.shape
    groups, keys = k_BGKD.shape[1:3]
    wide = torch.promote_types(q_BHQD.dtype, torch.float32)
    last_BQ1 = length_B[:, None, None] - torch.arange(queries, 0, -1, device=length_B.device)[:, None]
    hidden_BQK = torch.arange(keys, device=length_B.device) > last_BQ1
    q_BGND = q_BHQD.to(wide).reshape(batch, groups, -1, head_dim)
    logits_BHQK = (scale * (q_BGND @ k_BGKD.to(wide).mT)).view(batch, heads, queries, keys)
    weights_BHQK = entmax15(logits_BHQK.masked_fill(hidden_BQK[:, None], -torch.inf)).to(v_BGKD.dtype)
    output_BGND = weights_BHQK.view(batch, groups, -1, keys) @ v_BGKD
    return output_BGND.view(batch, heads, queries, v_BGKD.shape[3])
