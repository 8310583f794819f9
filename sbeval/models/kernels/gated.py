"""A fused Triton kernel for gated activations, `activation(gate) * up`.

It can pad the rows of its output with zeros, for a matmul with wider rows; padding in PyTorch would copy the output.

Shape suffixes: N rows, F width, W width with padding.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from sbeval.attention.impl.triton.hardware import on_device_of

_BLOCK = 1024


@triton.jit
def _kernel(
    gate, up, out, width, readable, out_width, gate_stride, up_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + row * gate_stride + column, mask=column < readable, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=column < readable, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = g / (1.0 + tl.exp(-g))
    elif ACTIVATION == "gelu":
        active = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(a)) is the sigmoid of 2a
        active = g / (1.0 + tl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g)))
    else:
        active = tl.where(g < 0.0, 0.0, g)
    # padding is set to zero: the next matmul multiplies it by zero weights, and a NaN would survive that
    result = tl.where(column < width, active * u, 0.0)
    tl.store(out + row * out_width + column, result.to(out.dtype.element_ty), mask=column < out_width)


def kernel_gated(activation: str, gate: Tensor, up: Tensor, *, out_width: int | None = None) -> Tensor:
    """Computes `activation(gate) * up` in fp32 and rounds once.

    Args:
        activation: one of `sbeval.models.config.PLAIN_ACTIVATIONS`.
        gate: [..., F] in fp16, bf16 or fp32; rows need not be contiguous with each other.
        up: [..., F]; dtype and strides as for `gate`.
        out_width: W, width of the output with zero padding; None means F.

    Returns:
        [..., W] in the gate's dtype.
    """
    width = gate.shape[-1]
    out_width = width if out_width is None else out_width
    gate_NF, up_NF = gate.reshape(-1, width), up.reshape(-1, width)
    gate_NF, up_NF = (x if x.stride(1) == 1 else x.contiguous() for x in (gate_NF, up_NF))
    out_NW = torch.empty(len(gate_NF), out_width, dtype=gate.dtype, device=gate.device)
    if out_NW.numel():
        block = min(_BLOCK, triton.next_power_of_2(out_width))
        with on_device_of(gate):
            _kernel[(len(gate_NF), -(-out_width // block))](
                gate_NF, up_NF, out_NW, width, max(width, min(out_width, _readable(gate_NF), _readable(up_NF))),
                out_width, gate_NF.stride(0), up_NF.stride(0), ACTIVATION=activation, BLOCK=block, num_warps=4,
            )  # fmt: skip
    return out_NW.view(*gate.shape[:-1], out_width)


def _readable(x_NF: Tensor) -> int:
    """Returns how many elements from the start of a row are safe to read, at least F.

    They include the gap before the next row, so that loads of 16 bytes may read past F.
    """
    elements = x_NF.untyped_storage().nbytes() // x_NF.element_size() - x_NF.storage_offset()
    return int(min(x_NF.stride(0), elements - (len(x_NF) - 1) * x_NF.stride(0)))
