"""Norms: of the residual stream, and of queries, keys and outputs of heads.

Shape suffixes: B batch, H heads, Q new positions, D head_dim.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from sbeval.models.config import SbevalConfig

HEAD_NORM_EPS = 1e-5


def make_norm(config: SbevalConfig) -> nn.Module:
    """Returns the norm a configuration asks for, over the residual stream."""
    kind = nn.RMSNorm if config.norm == "rmsnorm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_eps)


def norm_of_queries(config: SbevalConfig, heads: int) -> nn.Module | None:
    """Returns the norm of so many heads of queries or keys; None where there is none."""
    if not config.qk_norm:
        return None
    eps = config.norm_eps if config.qk_norm_eps is None else config.qk_norm_eps
    if config.qk_norm_per_head:
        return OwnHeadsNorm(heads, config.head_dim, eps)
    return nn.RMSNorm(config.head_dim, eps=eps)


class OwnHeadsNorm(nn.Module):
    """RMSNorm of each head with weights of its own."""

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads, head_dim))

    def forward(self, x_BHQD: Tensor) -> Tensor:
        """[B, H, Q, D] to the same."""
        return rms_norm(x_BHQD, x_BHQD.shape[3:], eps=self.eps) * self.weight[:, None]


class HeadNorm(nn.GroupNorm):
    """GroupNorm of each position's concatenated heads, one group a head."""

    def __init__(self, config: SbevalConfig) -> None:
        heads = config.num_attention_heads
        super().__init__(heads, heads * config.head_dim, eps=HEAD_NORM_EPS)

    def forward(self, heads: Tensor) -> Tensor:
        """[B, Q, H * D] to the same."""
        return super().forward(heads.flatten(0, 1)).view(heads.shape)
