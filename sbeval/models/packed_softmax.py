"""Causal softmax attention over texts packed into one row: variable-length attention, or one text after another.

PyTorch's variable-length attention (`varlen_attn`) runs on a GPU for bf16 and fp16, head_dim a multiple of 8 and at
most 256, with or without a sliding window, but without a bias. In all other cases (CPU, ALiBi, FIRE), or if it fails,
attention runs once for each text. Neither way materialises a mask of all pairs.

Shape suffixes: H query heads, G key/value heads, T tokens of all texts, D head_dim, S texts.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from sbeval.models.kernels.devices import OptionalKernel
from sbeval.models.softmax import Bias, softmax_attention

LARGEST_HEAD_DIM = 256
_MULTIPLE = 8
_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def suits_varlen(q_1HTD: Tensor, bias: Bias | None) -> bool:
    """Whether `varlen_attn` supports this device, dtype, head_dim and bias."""
    head_dim = q_1HTD.shape[3]
    fits = head_dim % _MULTIPLE == 0 and head_dim <= LARGEST_HEAD_DIM
    return q_1HTD.is_cuda and q_1HTD.dtype in (torch.bfloat16, torch.float16) and fits and bias is None


class VarlenAttention(OptionalKernel):
    """PyTorch's `varlen_attn`, or another `function` with the same arguments; after a failure it is not tried again."""

    def __init__(self, function: Callable[..., Any] = varlen_attn) -> None:
        super().__init__("PyTorch's variable-length attention", "attention runs once for each text instead")
        self._function = function

    def __call__(
        self,
        q_1HTD: Tensor,
        k_1GTD: Tensor,
        v_1GTD: Tensor,
        *,
        lengths: Sequence[int],
        cu_seqlens: Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor | None:
        """Returns [1, H, T, D], or None if the kernel failed now or before."""
        groups, longest = q_1HTD.shape[1] // k_1GTD.shape[1], max(lengths)
        # the window of varlen_attn counts keys to the left of the query, without the key at its position
        left_window = -1 if sliding_window is None or sliding_window >= longest else sliding_window - 1

        def run() -> Tensor:
            # not all versions of PyTorch support grouped-query attention here
            keys = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (k_1GTD, v_1GTD))
            query, key, value = (x[0].transpose(0, 1) for x in (q_1HTD, *keys))
            texts = (cu_seqlens, cu_seqlens, longest, longest)
            output: Tensor = self._function(query, key, value, *texts, scale=scale, window_size=(left_window, 0))
            return output.transpose(0, 1)[None]

        return self.attempt(run)


varlen_attention = VarlenAttention()


def packed_softmax_attention(
    q_1HTD: Tensor,
    k_1GTD: Tensor,
    v_1GTD: Tensor,
    lengths: Sequence[int],
    *,
    scale: float,
    sliding_window: int | None = None,
    bias: Bias | None = None,
    position_ids_1T: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Computes causal attention within each of S packed texts, [1, H, T, D].

    Args:
        q_1HTD: queries of all texts.
        k_1GTD: keys.
        v_1GTD: values.
        lengths: number of tokens of each of the S texts, in total T; a text may be empty.
        scale: factor of the logits.
        sliding_window: as in `softmax_attention`.
        bias: as in `softmax_attention`.
        position_ids_1T: position of each token in its text, for a bias that depends on it.
        cu_seqlens: int32 [S + 1] on the tensors' device, starts of the texts and T; None excludes `varlen_attn`.
    """
    heads = (q_1HTD, k_1GTD, v_1GTD)
    options: dict[str, Any] = {"scale": scale, "sliding_window": sliding_window}
    if cu_seqlens is not None and suits_varlen(q_1HTD, bias):
        output_1HTD = varlen_attention(*heads, lengths=lengths, cu_seqlens=cu_seqlens, **options)
        if output_1HTD is not None:
            return output_1HTD
    return text_by_text(*heads, lengths=lengths, position_ids=position_ids_1T, bias=bias, **options)


def text_by_text(
    *heads: Tensor,
    lengths: Sequence[int],
    position_ids: Tensor | None = None,
    attention: Callable[..., Tensor] = softmax_attention,
    **options: Any,
) -> Tensor:
    """Runs `attention` with these arguments, once for each text; returns [1, H, T, D]."""
    texts = [torch.split(x, list(lengths), dim=2) for x in heads]
    positions = [None] * len(lengths) if position_ids is None else torch.split(position_ids, list(lengths), dim=1)
    # cuDNN builds a plan for every new length, which takes longer than the attention of a text
    with sdpa_kernel(_WITHOUT_CUDNN) if heads[0].is_cuda else contextlib.nullcontext():
        mixed = [
            attention(q, k, v, position_ids_BQ=position_ids_BQ, **options)
            for q, k, v, position_ids_BQ in zip(*texts, positions, strict=True)
            if q.shape[2]
        ]
    return torch.cat(mixed, dim=2)
