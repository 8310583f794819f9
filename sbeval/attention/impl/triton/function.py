"""The kernels as one differentiable PyTorch operator that torch.compile traces and CUDA graphs capture.

`sbeval::stickbreaking_forward` and `sbeval::stickbreaking_backward` have fake implementations, so tracing does not look
inside them. They read nothing back from the device, so a CUDA graph can capture them. An operator costs the host tens
of microseconds per call, longer than the kernel runs on a short text (benchmarks/results/host_time_h200.md). So the
kernels are launched without the operator if no gradient is needed and no trace, mode or transform watches the tensors.
"""

import math
import os
from typing import Any

import torch
from torch import Tensor

from sbeval.attention.impl.triton.backward import backward
from sbeval.attention.impl.triton.decode import decode, suits_decode
from sbeval.attention.impl.triton.deterministic import deterministic_backward
from sbeval.attention.impl.triton.forward import forward
from sbeval.attention.impl.triton.hardware import on_device_of
from sbeval.attention.packed import key_ranges, row_starts

# log2 of fp32's smallest normal number: a stick below it changes no bit of an output
LOG2_NOTHING_LEFT = -126.0


def triton_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, attend_current: bool, seq_start: Tensor | None,
    cu_seqlens: Tensor | None, skip_threshold: float | None, cu_seqlens_k: Tensor | None,
    newer_remainder: Tensor | None, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes stick-breaking attention with the Triton kernels; arguments as in `stickbreaking_attention`.

    Returns:
        Output [B, H, Q, D] in q's dtype and remainder [B, H, Q] in fp32.

    Raises:
        ValueError: fp64, head_dim above 256, or tensors on a device that the kernels do not support.
    """
    if q.dtype == torch.float64:
        raise ValueError("impl='triton' takes fp16, bf16 or fp32, got fp64: use impl='reference' or 'blockwise'")
    if q.shape[-1] > 256:
        raise ValueError(f"impl='triton' takes head_dim up to 256, got {q.shape[-1]}: use impl='blockwise'")
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"impl='triton' needs CUDA tensors, got {q.device}: use impl='blockwise'")
    row_start = None
    if cu_seqlens is not None:
        row_start = row_starts(cu_seqlens, q.shape[2]) if causal else key_ranges(cu_seqlens, cu_seqlens_k, q.shape[2])
    save = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    # the output gets q's strides
    q, k, v = _without_overlap(_dense(q)), _dense(k), _dense(v)
    # kernels read starts with stride 1
    seq_start = None if seq_start is None else seq_start.contiguous()
    # calling the operator takes longer than the kernel runs on a short text
    run = _forward if save or is_followed(q, k, v, seq_start, row_start) else _launch
    # the operator accepts NumPy numbers and one-element tensors, the kernel launch does not
    scale = scale if isinstance(scale, float) else float(scale)
    output, remainder, _, _ = run(
        *(q, k, v, scale, attend_current, seq_start, row_start, skip_threshold, save, causal, newer_remainder)
    )
    return output, remainder


def is_followed(*tensors: Tensor | None) -> bool:
    """Whether a PyTorch trace, dispatch mode or function transform watches the tensors and must see an operator."""
    for tensor in tensors:
        if tensor is not None and type(tensor) is not Tensor:
            return True
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _launch(
    q: Tensor, k: Tensor, v: Tensor, scale: float, attend_current: bool, seq_start: Tensor | None,
    row_start: Tensor | None, skip_threshold: float | None, save: bool, causal: bool = True,
    newer_remainder: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    log2_threshold = LOG2_NOTHING_LEFT if skip_threshold is None else math.log2(skip_threshold)
    inputs = (q, k, v, scale, attend_current, seq_start)
    with on_device_of(q):
        if causal and not save and row_start is None and suits_decode(q, k):
            output, remainder = decode(*inputs, log2_threshold, skipping=skip_threshold is not None)
            return output, remainder, remainder.new_empty(0), remainder.new_empty(0, dtype=torch.int32)
        return forward(*inputs, row_start, 2.0**log2_threshold, save, causal, newer_remainder)


_forward = torch.library.custom_op("sbeval::stickbreaking_forward", _launch, mutates_args=())


@_forward.register_fake
def _(
    q: Tensor, k: Any, v: Any, scale: Any, attend_current: Any, seq_start: Any, row_start: Any, skip_threshold: Any,
    save: bool, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, heads, queries = q.shape[:3]
    return (
        torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device),
        q.new_empty((batch, heads, queries), dtype=torch.float32),
        q.new_empty((batch, heads, queries, 2) if save else (0,), dtype=torch.float32),
        q.new_empty((batch, heads, (queries + 15) // 16) if save else (0,), dtype=torch.int32),
    )


@torch.library.custom_op("sbeval::stickbreaking_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, d_output: Tensor, d_remainder: Tensor, remainder: Tensor, stick: Tensor,
    stop: Tensor, scale: float, attend_current: bool, seq_start: Tensor | None, row_start: Tensor | None,
    causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    # read when the backward pass runs, so that the setting also holds inside a compiled graph
    run = deterministic_backward if torch.are_deterministic_algorithms_enabled() else backward
    saved = (remainder, stick, stop)
    with on_device_of(q):
        return run(q, k, v, d_output, d_remainder, *saved, scale, attend_current, seq_start, row_start, causal)


@_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    return dq, k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, scale, attend_current, seq_start, row_start, _, _, causal, _ = inputs
    ctx.save_for_backward(q, k, v, *output[1:], seq_start, row_start)
    ctx.settings = (scale, attend_current, causal)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_output: Tensor | None, d_remainder: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, remainder, stick, stop, seq_start, row_start = ctx.saved_tensors
    d_output = torch.zeros_like(q) if d_output is None else _dense(d_output.to(q.dtype))
    d_remainder = q.new_zeros(q.shape[:3], dtype=torch.float32) if d_remainder is None else d_remainder.contiguous()
    scale, attend_current, causal = ctx.settings
    inputs = (q, k, v, d_output, d_remainder, remainder, stick, stop, scale, attend_current, seq_start, row_start)
    return *_backward(*inputs, causal), *[None] * 8


_forward.register_autograd(_gradients, setup_context=_save_for_backward)


def _dense(tensor: Tensor) -> Tensor:
    """Returns the tensor if its rows are contiguous and no dimension is broadcast, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 and 0 not in tensor.stride() else tensor.contiguous()


def _without_overlap(tensor: Tensor) -> Tensor:
    """Returns the tensor if no two of its elements share memory, else a contiguous copy."""
    _, heads, rows, width = tensor.shape
    of_text, of_head, of_row, _ = tensor.stride()
    # the usual layout after a projection; the general check below takes the host microseconds
    if tensor.is_contiguous() or (of_head >= width and of_row >= heads * of_head and of_text >= rows * of_row):
        return tensor
    steps = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    for stride, size in steps:
        if size * stride <= sum((other - 1) * shorter for shorter, other in steps if shorter <= stride):
            return tensor.contiguous()
    return tensor
