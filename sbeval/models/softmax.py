"""Causal softmax attention of the baselines: PyTorch's own, over blocks of queries where a mask or bias is needed.

No [L, L] tensor is ever held: a block of queries sees its own mask, which the backward pass computes again.

Shape suffixes: B batch, H query heads, G key/value heads, Q queries, K keys, D head_dim, R rows of a block, C keys a
block can see.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

MASK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Most elements of one block's mask or bias, by device: small enough for memory, large enough to keep it busy."""

Bias = Callable[[Tensor, Tensor], Tensor]
"""From query positions [B or 1, R] and distances to keys [R, C] (>= 0 where seen) to a bias [B or 1, H, R, C]."""


def softmax_attention(
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
    """Returns [B, H, Q, D]; the queries are the last Q of the K positions.

    Args:
        q_BHQD: [B, H, Q, D] queries.
        k_BGKD: [B, G, K, D] keys.
        v_BGKD: [B, G, K, D] values.
        scale: factor of the logits.
        sliding_window: query j sees keys i with j - i < window; None sees all.
        seq_start_B: [B] index of the first key that is no padding; rows before it see themselves alone.
        bias: added to the logits; must be differentiable where its parameters are.
        position_ids_BQ: [B or 1, Q] positions of the queries in their texts, for a bias that depends on them; None
            counts from the first key.
    """
    queries, keys = q_BHQD.shape[2], k_BGKD.shape[2]
    windowed = sliding_window is not None and sliding_window < keys
    plain = not windowed and seq_start_B is None and bias is None
    if not (plain and q_BHQD.is_cuda and q_BHQD.dtype in (torch.float16, torch.bfloat16)):
        # only the flash kernels take grouped heads without falling back to O(L^2) memory
        group = q_BHQD.shape[1] // k_BGKD.shape[1]
        k_BGKD, v_BGKD = k_BGKD.repeat_interleave(group, 1), v_BGKD.repeat_interleave(group, 1)
    grouped = q_BHQD.shape[1] != k_BGKD.shape[1]
    if plain and queries in (1, keys):
        return scaled_dot_product_attention(
            q_BHQD, k_BGKD, v_BGKD, is_causal=queries == keys > 1, scale=scale, enable_gqa=grouped
        )

    def block(first: int, last: int, q_BHRD: Tensor, k: Tensor, v: Tensor, positions: Tensor | None) -> Tensor:
        """Rows `first` to `last` (exclusive, as positions among the keys)."""
        oldest = max(0, first - sliding_window + 1) if sliding_window is not None else 0
        row_R = torch.arange(first, last, device=q_BHRD.device)
        key_C = torch.arange(oldest, last, device=q_BHRD.device)
        distance_RC = row_R[:, None] - key_C
        seen = distance_RC >= 0
        if sliding_window is not None:
            seen = seen & (distance_RC < sliding_window)
        mask = seen[None, None]
        if seq_start_B is not None:
            mask = mask & ((key_C >= seq_start_B[:, None, None, None]) | (distance_RC == 0))
        if bias is not None:
            if positions is None:
                positions = row_R[None]
            mask = bias(positions, distance_RC).to(q_BHRD.dtype).masked_fill(~mask, -torch.inf)
        return scaled_dot_product_attention(
            q_BHRD, k[:, :, oldest:last], v[:, :, oldest:last], attn_mask=mask, scale=scale, enable_gqa=grouped
        )

    width = keys if sliding_window is None else min(keys, 2 * sliding_window)
    per_row = seq_start_B is not None or (position_ids_BQ is not None and len(position_ids_BQ) > 1)
    masks = q_BHQD.shape[0] if per_row else 1
    elements = MASK_ELEMENTS.get(q_BHQD.device.type, 1 << 22)
    rows = max(1, elements // (width * masks * (1 if bias is None else q_BHQD.shape[1])))
    if sliding_window is not None:
        rows = min(rows, max(sliding_window, 64))
    outputs = []
    for start in range(0, queries, rows):
        stop = min(queries, start + rows)
        positions = None if position_ids_BQ is None else position_ids_BQ[:, start:stop]
        arguments = (keys - queries + start, keys - queries + stop, q_BHQD[:, :, start:stop], k_BGKD, v_BGKD, positions)
        if torch.is_grad_enabled() and stop - start < queries:
            outputs.append(checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(block(*arguments))
    return torch.cat(outputs, dim=2)
