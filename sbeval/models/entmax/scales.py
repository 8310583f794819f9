"""Factors of the queries that grow with the number of keys: SSMax and ASEntmax.

With more keys, softmax spreads its weight over more of them. SSMax (Nakanishi 2025, arXiv 2501.19399) multiplies the
logits of a query with n keys by s log n, with one learned s for each head. ASEntmax (Vasylenko et al. 2025, arXiv
2506.16640) multiplies those of entmax-1.5 by 1 + beta (log n)^gamma, where beta = softplus(.) and gamma = 2 tanh(.) are
learned projections of the layer's input. As in its authors' code, its n is the number of keys plus one, since the
logarithm of one key is 0 and gamma may be negative. With NAPE, ALiBi's heads keep their logits.

Shape suffixes: B batch, H query heads, S heads that are scaled (the last ones), Q new positions, D head_dim,
E hidden_size.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, softplus

from sbeval.models.biases import nape_slopes
from sbeval.models.config import SbevalConfig

GAMMA_RANGE = 2.0
_DEFAULT_LENGTH_TOKENS = 1024


class SSMaxScale(nn.Module):
    """SSMax: s log n for a query with n keys, with a learned s for each head."""

    def __init__(self, heads: int, length_tokens: int | None) -> None:
        super().__init__()
        self.length_tokens = length_tokens or _DEFAULT_LENGTH_TOKENS
        self.multiple = nn.Parameter(torch.empty(heads))

    @property
    def initial_multiple(self) -> float:
        """The s with which the mean factor over a text of the training length is 1: 0.169 for 1024 tokens."""
        return self.length_tokens / max(1.0, math.lgamma(self.length_tokens + 1))

    def forward(self, hidden_BQE: Tensor, keys_BQ: Tensor) -> Tensor:
        """Returns the factors [B or 1, S, Q] in fp32 or fp64, for queries that see this many keys."""
        multiple_S = self.multiple.to(torch.promote_types(self.multiple.dtype, torch.float32))
        return multiple_S[:, None] * keys_BQ.to(multiple_S.dtype).log()[:, None]


class AdaptiveScale(nn.Linear):
    """ASEntmax: a linear projection of the layer's input to beta and gamma of each head."""

    def forward(self, hidden_BQE: Tensor, keys_BQ: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the factors [B, S, Q] in fp32 or fp64, for queries that see this many keys."""
        wide = torch.promote_types(hidden_BQE.dtype, torch.float32)
        # autocast would round gamma, an exponent
        with torch.autocast(hidden_BQE.device.type, enabled=False):
            raw_BQP = linear(hidden_BQE.to(wide), self.weight.to(wide), self.bias.to(wide))
            beta_BSQ, gamma_BSQ = raw_BQP.transpose(1, 2).chunk(2, dim=1)
            log_log_B1Q = (keys_BQ + 1).to(wide).log().log()[:, None]
            return 1.0 + softplus(beta_BSQ) * (GAMMA_RANGE * gamma_BSQ.tanh() * log_log_B1Q).exp()


class QueryScale(nn.Module):
    """Multiplies the queries of all heads, or of NAPE's heads without positions, by SSMax's or ASEntmax's factors."""

    def __init__(self, config: SbevalConfig) -> None:
        super().__init__()
        heads = config.num_attention_heads
        self.unscaled_heads = sum(map(bool, nape_slopes(heads))) if config.attention == "nape" else 0
        self.sliding_window = config.sliding_window
        scaled = heads - self.unscaled_heads
        self.factor: nn.Module = (
            SSMaxScale(scaled, config.training_length_tokens)
            if config.attention_weights == "ssmax"
            else AdaptiveScale(config.hidden_size, 2 * scaled)
        )

    def forward(self, q_BHQD: Tensor, hidden_BQE: Tensor, position_ids_BQ: Tensor) -> Tensor:
        """Returns the scaled queries [B, H, Q, D]; `position_ids_BQ` is each query's position in its text, from 0."""
        keys_BQ = position_ids_BQ.clamp_min(0) + 1
        if self.sliding_window is not None:
            keys_BQ = keys_BQ.clamp_max(self.sliding_window)
        factor_BSQ = self.factor(hidden_BQE, keys_BQ)
        factor_BHQ = pad(factor_BSQ, (0, 0, self.unscaled_heads, 0), value=1.0)
        return (q_BHQD.to(factor_BHQ.dtype) * factor_BHQ[..., None]).to(q_BHQD.dtype)
