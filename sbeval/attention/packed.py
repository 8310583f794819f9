"""Packed batches: several sequences one after another in one row of tokens, delimited by `cu_seqlens`."""

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor, k: Tensor, cu_seqlens_k: Tensor | None = None) -> None:
    """Checks that `cu_seqlens` describes the tokens of q [1, H, T, D] and k [1, G, T, D].

    With `cu_seqlens_k`, which describes k [1, G, K, D], `cu_seqlens` describes only q.

    Checking the values costs one transfer from the device. They are not checked while a CUDA graph is captured,
    while torch.compile traces, or in meta and fake tensors, which have no values.

    Raises:
        ValueError: the shape, dtype, device or values do not fit.
    """
    if cu_seqlens_k is not None:
        if cu_seqlens_k.shape != cu_seqlens.shape:
            raise ValueError(
                "cu_seqlens and cu_seqlens_k must name the same sequences, got shapes "
                f"{list(cu_seqlens.shape)} and {list(cu_seqlens_k.shape)}"
            )
        check_cu_seqlens(cu_seqlens, q, q)
        check_cu_seqlens(cu_seqlens_k, k, k)
        return
    tokens = q.shape[2]
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must be int32 [sequences + 1], got {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on {q.device} like q, got {cu_seqlens.device}")
    if q.shape[0] != 1 or k.shape[2] != tokens:
        raise ValueError(
            "cu_seqlens needs batch size 1 and as many queries as keys, got batch size "
            f"{q.shape[0]} with {tokens} queries and {k.shape[2]} keys"
        )
    if torch.compiler.is_compiling() or cu_seqlens.is_meta or isinstance(cu_seqlens, FakeTensor):
        return
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    falls = (cu_seqlens.diff() < 0).any()
    if bool(falls | (cu_seqlens[0] != 0) | (cu_seqlens[-1] != tokens)):
        raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, {tokens}, got {cu_seqlens.tolist()}")


def row_starts(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Returns int32 [tokens]: the first position of each token's sequence. Needs no transfer from the device."""
    position = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    begun = torch.searchsorted(cu_seqlens, position, right=True)
    # values are not checked while a CUDA graph is captured; a negative start would let kernels read outside the keys
    return cu_seqlens[begun - 1].clamp_min(0)


def key_ranges(cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, tokens: int) -> Tensor:
    """Returns which keys each query may see, as int32.

    Without `cu_seqlens_k`: [1, tokens], the first visible key. With it: [2, tokens], the first visible key and one past
    the last. Needs no transfer from the device.
    """
    if cu_seqlens_k is None:
        return row_starts(cu_seqlens, tokens)[None]
    position = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    sequence = (torch.searchsorted(cu_seqlens, position, right=True) - 1).clamp(0, len(cu_seqlens) - 2)
    return torch.stack([cu_seqlens_k[sequence], cu_seqlens_k[sequence + 1]]).clamp_min(0)
