"""The reference implementation that defines the result: eager, O(L^2) memory, in fp32 or the inputs' wider dtype.

Shape suffixes: B batch, H query heads, G key/value heads, Q queries, K keys, D head_dim.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from sbeval.attention.packed import key_ranges


def log_weights(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    scale: float,
    attend_current: bool,
    seq_start_B: Tensor | None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns log attention weights [B, H, Q, K], -inf for masked keys, and log remainders [B, H, Q]."""
    k_BHKD = k_BGKD.repeat_interleave(q_BHQD.shape[1] // k_BGKD.shape[1], dim=1)
    queries, keys = q_BHQD.shape[2], k_BHKD.shape[2]
    logits_BHQK = scale * (q_BHQD @ k_BHKD.mT)
    allowed_QK = torch.ones(queries, keys, dtype=torch.bool, device=q_BHQD.device)
    if causal:
        allowed_QK = allowed_QK.tril(keys - queries - (0 if attend_current else 1))
    if seq_start_B is not None:
        present_BK = torch.arange(keys, device=q_BHQD.device) >= seq_start_B[:, None]
        allowed_QK = allowed_QK & present_BK[:, None, None, :]
    if cu_seqlens is not None:
        start_Q, *stop_Q = key_ranges(cu_seqlens, cu_seqlens_k, queries)
        key_K = torch.arange(keys, device=q_BHQD.device)
        allowed_QK = allowed_QK & (key_K >= start_Q[:, None])
        if stop_Q:
            allowed_QK = allowed_QK & (key_K < stop_Q[0][:, None])
    log_rest_BHQK = torch.where(allowed_QK, logsigmoid(-logits_BHQK), 0.0)
    # this sum includes the key itself; shifting by one key excludes it without a subtraction that could cancel
    from_key_BHQK = log_rest_BHQK.flip(-1).cumsum(-1).flip(-1)
    after_key_BHQK = torch.nn.functional.pad(from_key_BHQK[..., 1:], (0, 1))
    log_weights_BHQK = torch.where(allowed_QK, logsigmoid(logits_BHQK) + after_key_BHQK, -torch.inf)
    return log_weights_BHQK, log_rest_BHQK.sum(-1)


def reference(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    scale: float,
    attend_current: bool,
    seq_start_B: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Returns output [B, H, Q, D] and remainder [B, H, Q]; arguments as in `stickbreaking_attention`."""
    dtype = torch.promote_types(q_BHQD.dtype, torch.float32)
    log_weights_BHQK, log_remainder_BHQ = log_weights(
        q_BHQD.to(dtype), k_BGKD.to(dtype), scale, attend_current, seq_start_B, cu_seqlens, cu_seqlens_k, causal
    )
    v_BHKD = v_BGKD.to(dtype).repeat_interleave(q_BHQD.shape[1] // v_BGKD.shape[1], dim=1)
    return (log_weights_BHQK.exp() @ v_BHKD).to(q_BHQD.dtype), log_remainder_BHQ.exp()
