"""Packed batches: several sequences one after another in one row of tokens, told apart by where they begin."""

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor, k: Tensor) -> None:
    """Refuses cumulative lengths that do not describe the tokens of q [1, H, T, D] and k [1, G, T, D].

    The values are looked at in one transfer from the device, and not at all while a graph is recorded or where there
    are none, in tensors of shapes alone.
    """
    tokens = q.shape[2]
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must be int32 [sequences + 1], got {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens must be on {q.device} like q, got {cu_seqlens.device}")
    if q.shape[0] != 1 or k.shape[2] != tokens:
        raise ValueError(
            "cu_seqlens needs a batch of one with as many queries as keys, got a batch of "
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
    """Returns int32 [tokens]: where the sequence of each token begins. Needs no transfer from the device."""
    position = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens.device)
    begun = torch.searchsorted(cu_seqlens, position, right=True)
    # never below zero, whatever was not looked at while a graph was recorded: kernels read from there on
    return cu_seqlens[begun - 1].clamp_min(0)
