"""Norms of the residual stream, and of the queries, keys and outputs of attention heads.

Shape suffixes: B batch, H heads, Q new positions, D head_dim.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from sbeval.models.config import SbevalConfig

HEAD_NORM_EPS = 1e-5


def make_norm(config: SbevalConfig) -> nn.Module:
    """Returns the RMSNorm or LayerNorm of the residual stream that the configuration names."""
    kind = nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps)


def make_qk_norm(config: SbevalConfig, heads: int) -> nn.Module | None:
    """Returns the norm of `heads` query or key heads, or None if the configuration has no `qk_norm`."""
    if not config.qk_norm:
        return None
    eps = config.norm_eps if config.qk_norm_eps is None else config.qk_norm_eps
    if config.qk_norm_over_heads:
        return AllHeadsRMSNorm(heads, config.head_dim, eps)
    if config.qk_norm_per_head:
        return PerHeadRMSNorm(heads, config.head_dim, eps)
    return nn.RMSNorm(config.head_dim, eps=eps)


class PerHeadRMSNorm(nn.Module):
    """RMSNorm over head_dim with a separate weight vector for each head."""

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads, head_dim))

    def forward(self, x_BHQD: Tensor) -> Tensor:
        """Returns the normed heads, [B, H, Q, D]."""
        return rms_norm(x_BHQD, x_BHQD.shape[3:], eps=self.eps) * self.weight[:, None]


class AllHeadsRMSNorm(PerHeadRMSNorm):
    """RMSNorm whose mean square is taken over all heads, with a separate weight vector for each head."""

    def forward(self, x_BHQD: Tensor) -> Tensor:
        """Returns the normed heads, [B, H, Q, D]."""
        wide = x_BHQD.to(torch.promote_types(x_BHQD.dtype, torch.float32))
        mean_B1Q1 = wide.square().mean(dim=(1, 3), keepdim=True)
        return (wide * (mean_B1Q1 + self.eps).rsqrt()).to(x_BHQD.dtype) * self.weight[:, None]


class HeadNorm(nn.GroupNorm):
    """GroupNorm over the concatenated heads of each position; each head is one group."""

    def __init__(self, config: SbevalConfig) -> None:
        heads = config.num_attention_heads
        super().__init__(heads, heads * config.head_dim, eps=HEAD_NORM_EPS)

    def forward(self, heads: Tensor) -> Tensor:
        """Returns the normed heads, [B, Q, H * D]."""
        return super().forward(heads.flatten(0, 1)).view(heads.shape)
