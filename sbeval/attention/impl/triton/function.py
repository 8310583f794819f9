"""The kernels as one differentiable function."""

import contextlib
import math
import os
from typing import Any

import torch
from torch import Tensor

from sbeval.attention.impl.triton.backward import backward
from sbeval.attention.impl.triton.forward import forward

# a stick below 2^-150 is zero in fp32, so visiting older keys could not change a bit of the output
LOG2_NOTHING_LEFT = -150.0


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    attend_current: bool,
    seq_start: Tensor | None,
    skip_threshold: float | None,
) -> tuple[Tensor, Tensor]:
    """Returns output [B, H, Q, D] and remainder [B, H, Q] in fp32.

    Raises:
        ValueError: fp64, head_dim above 256, or tensors the kernels cannot run on.
    """
    if q.dtype == torch.float64:
        raise ValueError("impl='triton' takes fp16, bf16 or fp32, got fp64: use impl='reference' or 'blockwise'")
    if q.shape[-1] > 256:
        raise ValueError(f"impl='triton' takes head_dim up to 256, got {q.shape[-1]}: use impl='blockwise'")
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"impl='triton' needs CUDA tensors, got {q.device}: use impl='blockwise'")
    output, remainder = _TritonAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, scale, attend_current, seq_start, skip_threshold
    )
    return output, remainder


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        attend_current: bool,
        seq_start: Tensor | None,
        skip_threshold: float | None,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (_dense(tensor) for tensor in (q, k, v))
        log2_threshold = LOG2_NOTHING_LEFT if skip_threshold is None else math.log2(skip_threshold)
        save = any(ctx.needs_input_grad)
        with _device_of(q):
            output, remainder, stick, stop, stop_rows = forward(
                q, k, v, scale, attend_current, seq_start, None, log2_threshold, save
            )
        if save:
            ctx.save_for_backward(q, k, v, stick, stop)
            ctx.settings = (stop_rows, scale, attend_current, seq_start)
        return output, remainder

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, stick, stop = ctx.saved_tensors
        d_output, d_remainder = _dense(grads[0].to(q.dtype)), grads[1].float().contiguous()
        with _device_of(q):
            dq, dk, dv = backward(q, k, v, d_output, d_remainder, stick, stop, *ctx.settings, None)
        return dq, dk, dv, None, None, None, None


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors' own."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _dense(tensor: Tensor) -> Tensor:
    """The tensor itself where its rows are contiguous and nothing is broadcast, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 and 0 not in tensor.stride() else tensor.contiguous()
