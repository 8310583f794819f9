"""Causal softmax attention over texts packed into one row: all at once on a GPU, else text by text.

PyTorch's variable-length attention takes bf16 and fp16 heads whose size is a multiple of 8 up to 256, a window, and no
bias. Where it does not exist, does not fit or does not run, the texts are mixed one by one.

Shape suffixes: H query heads, G key/value heads, T tokens of all texts, D head_dim, S texts.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sbeval.models.kernels.devices import OptionalKernel
from sbeval.models.softmax import Bias, softmax_attention

LARGEST_HEAD_DIM = 256
_MULTIPLE = 8
_NEEDED = {"scale", "window_size"}
"""Options that PyTorch's first version of it did not have."""
_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def suits_varlen(q_1HTD: Tensor, bias: Bias | None) -> bool:
    """Whether the fast kernel takes these tensors."""
    head_dim = q_1HTD.shape[3]
    fits = head_dim % _MULTIPLE == 0 and head_dim <= LARGEST_HEAD_DIM
    return q_1HTD.is_cuda and q_1HTD.dtype in (torch.bfloat16, torch.float16) and fits and bias is None


def kernel_arguments(
    q_1HTD: Tensor,
    k_1GTD: Tensor,
    v_1GTD: Tensor,
    lengths: Sequence[int],
    scale: float,
    sliding_window: int | None,
    cu_seqlens: Tensor | None,
) -> dict[str, Any]:
    """Returns what PyTorch's variable-length attention is called with: heads [T, H, D], and where texts begin.

    Its window counts the keys left of the query, without the query's own.
    """
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(q_1HTD.device)
    groups = q_1HTD.shape[1] // k_1GTD.shape[1]
    if groups > 1:
        # not all versions take grouped heads
        k_1GTD, v_1GTD = (x.repeat_interleave(groups, 1) for x in (k_1GTD, v_1GTD))
    query, key, value = (x[0].transpose(0, 1) for x in (q_1HTD, k_1GTD, v_1GTD))
    longest = max(lengths)
    seen = -1 if sliding_window is None or sliding_window >= longest else sliding_window - 1
    return {
        "query": query,
        "key": key,
        "value": value,
        "cu_seq_q": cu_seqlens,
        "cu_seq_k": cu_seqlens,
        "max_q": longest,
        "max_k": longest,
        "scale": scale,
        "window_size": (seen, 0),
    }


class VarlenAttention(OptionalKernel):
    """PyTorch's variable-length attention, or another `function` of the same arguments."""

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        super().__init__("PyTorch's variable-length attention", "going text by text")
        if function is None:
            try:
                from torch.nn.attention.varlen import varlen_attn
            except ImportError:
                self.works = False
            else:
                function = varlen_attn
                self.works = set(inspect.signature(varlen_attn).parameters) >= _NEEDED
        self._function: Callable[..., Any] | None = function

    def __call__(
        self,
        q_1HTD: Tensor,
        k_1GTD: Tensor,
        v_1GTD: Tensor,
        lengths: Sequence[int],
        *,
        scale: float,
        sliding_window: int | None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | None:
        """Returns [1, H, T, D], or None where it does not run."""
        function = self._function
        if function is None:
            return None
        arguments = (q_1HTD, k_1GTD, v_1GTD, lengths, scale, sliding_window, cu_seqlens)
        return self.attempt(lambda: function(**kernel_arguments(*arguments)).transpose(0, 1)[None])


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
    """Returns [1, H, T, D]: causal attention within each of S texts.

    Args:
        q_1HTD: queries.
        k_1GTD: keys.
        v_1GTD: values.
        lengths: tokens of each text, S of them, T together; a text may be empty.
        scale: factor of the logits.
        sliding_window: query j sees keys i with j - i < window; None sees all of its text.
        bias: added to the logits.
        position_ids_1T: positions of the tokens in their texts, for a bias that depends on them.
        cu_seqlens: int32 [S + 1] on the tensors' device, where each text begins, if that is at hand.
    """
    if suits_varlen(q_1HTD, bias):
        found_1HTD = varlen_attention(
            q_1HTD, k_1GTD, v_1GTD, lengths, scale=scale, sliding_window=sliding_window, cu_seqlens=cu_seqlens
        )
        if found_1HTD is not None:
            return found_1HTD
    options = {"scale": scale, "sliding_window": sliding_window, "bias": bias}
    return text_by_text(q_1HTD, k_1GTD, v_1GTD, lengths, position_ids_1T, **options)


def text_by_text(
    q_1HTD: Tensor,
    k_1GTD: Tensor,
    v_1GTD: Tensor,
    lengths: Sequence[int],
    position_ids: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Returns [1, H, T, D], one text after the other; takes the options of `softmax_attention`."""
    texts = [torch.split(x, list(lengths), dim=2) for x in (q_1HTD, k_1GTD, v_1GTD)]
    positions = [None] * len(lengths) if position_ids is None else torch.split(position_ids, list(lengths), dim=1)

    def mixed() -> list[Tensor]:
        return [
            softmax_attention(q, k, v, position_ids_BQ=position_ids_BQ, **options)
            for q, k, v, position_ids_BQ in zip(*texts, positions, strict=True)
            if q.shape[2]
        ]

    if not q_1HTD.is_cuda:
        return torch.cat(mixed(), dim=2)
    # cuDNN plans anew for every length, which takes longer than a text
    with sdpa_kernel(_WITHOUT_CUDNN):
        return torch.cat(mixed(), dim=2)
