"""PyTorch's FlexAttention for a bias or a window: the bias is computed inside its kernel and never lies in memory.

Shape suffixes: B batch, H query heads, G key/value heads, L positions, D head_dim, Q queries.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sbeval.models.optional_kernel import OptionalKernel

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""From a logit, batch, head, query and key index to the logit with its bias."""

SHORTEST = 1024
"""Shorter texts fit a few blocks of rows of PyTorch's other kernels, and are not worth compiling for."""
_BLOCK = 128


def causal_blocks(length: int, sliding_window: int, device: torch.device) -> BlockMask:
    """Which blocks of 128 x 128 pairs are seen in full, in part, or not: keys with 0 <= j - i < window."""
    blocks = -(-length // _BLOCK)
    index = torch.arange(blocks, device=device)
    apart = (index[:, None] - index).clamp_min(-1)  # distances between blocks, -1 where the keys are newer
    nearest, farthest = apart * _BLOCK - (_BLOCK - 1), apart * _BLOCK + (_BLOCK - 1)
    full = (apart >= 0) & (nearest >= 0) & (farthest < sliding_window)
    partial = (apart >= 0) & (nearest < sliding_window) & ~full

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        count = chosen.sum(-1, dtype=torch.int32)
        first = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return count[None, None], first.to(torch.int32)[None, None].contiguous()

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < sliding_window)

    return BlockMask.from_kv_blocks(
        *listed(partial), *listed(full), BLOCK_SIZE=_BLOCK, mask_mod=seen, seq_lengths=(length, length)
    )


def flex_causal_attention(
    q_BHLD: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    *,
    scale: float,
    sliding_window: int,
    score_mod: ScoreMod | None,
    attention: Callable[..., Any] = flex_attention,
) -> Tensor:
    """Returns [B, H, L, D] of causal attention over the newest `sliding_window` keys.

    Args:
        q_BHLD: [B, H, L, D] queries.
        k_BGLD: [B, G, L, D] keys.
        v_BGLD: [B, G, L, D] values.
        scale: factor of the logits.
        sliding_window: keys with j - i < window only.
        score_mod: adds a bias; None adds none.
        attention: FlexAttention, compiled or not. Not compiled it holds all pairs.
    """
    output: Tensor = attention(
        q_BHLD,
        k_BGLD,
        v_BGLD,
        score_mod=score_mod,
        block_mask=_blocks(q_BHLD.shape[2], sliding_window, q_BHLD.device),
        scale=scale,
        enable_gqa=q_BHLD.shape[1] != k_BGLD.shape[1],
    )
    return output


_blocks = functools.lru_cache(maxsize=2)(causal_blocks)


class CompiledFlexAttention(OptionalKernel):
    """`flex_causal_attention` compiled at its first call.

    Args:
        compiled: FlexAttention where it is compiled already.
    """

    def __init__(self, compiled: Callable[..., Any] | None = None) -> None:
        super().__init__("PyTorch's FlexAttention", "going on with blocks of rows")
        self._compiled = compiled

    def __call__(self, q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, **options: Any) -> Tensor | None:
        """Takes what `flex_causal_attention` takes; returns [B, H, L, D], or None where it cannot be compiled."""

        def run() -> Tensor:
            if self._compiled is None:
                # one kernel for all lengths; `fullgraph` because what is run uncompiled holds all pairs
                self._compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True)
            return flex_causal_attention(q_BHLD, k_BGLD, v_BGLD, **options, attention=self._compiled)

        return self.attempt(run)


compiled_flex_attention = CompiledFlexAttention()


def suits_flex(q_BHQD: Tensor, k_BGKD: Tensor, *others: Tensor) -> bool:
    """Whether FlexAttention is the faster one: on a GPU, for whole texts of some length, without gradients.

    Args:
        q_BHQD: [B, H, Q, D] queries.
        k_BGKD: [B, G, K, D] keys.
        others: what the result depends on besides, the values and the parameters of a bias.
    """
    queries, keys, head_dim = q_BHQD.shape[2], k_BGKD.shape[2], q_BHQD.shape[3]
    kept = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BHQD, k_BGKD, *others))
    fits = q_BHQD.dtype != torch.float64 and 16 <= head_dim <= 256
    tracing = torch.compiler.is_compiling()
    return q_BHQD.is_cuda and not kept and fits and not tracing and queries == keys >= SHORTEST
