"""A fused Triton kernel for rotary embeddings, for queries or keys in any memory layout.

In plain PyTorch, a rotation takes about seven kernels, each of which reads and writes the whole tensor.

Shape suffixes: B batch, H heads, L positions, D head_dim, F rotated pairs.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sbeval.attention.impl.triton.hardware import on_device_of

_PAIRS_A_PROGRAM = 2048


@triton.jit
def _kernel(
    x, y, cos, sin, heads, length, pairs, head_dim,
    x_batch, x_head, x_row, y_batch, y_head, y_row, angle_batch, angle_row,
    REST: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None, None]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[None, :, None]
    pair = tl.arange(0, PAIRS)[None, None, :]
    x += batch * x_batch + row * x_row + head * x_head
    y += batch * y_batch + row * y_row + head * y_head
    inside = (row < length) & (head < heads)
    angle = batch * angle_batch + row * angle_row + pair
    in_bounds = (row < length) & (pair < pairs)
    c = tl.load(cos + angle, mask=in_bounds, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=in_bounds, other=0.0).to(tl.float32)
    mask = inside & (pair < pairs)
    first = tl.load(x + pair, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + pair + pairs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + pair, (first * c - second * s).to(y.dtype.element_ty), mask=mask)
    tl.store(y + pair + pairs, (second * c + first * s).to(y.dtype.element_ty), mask=mask)
    if REST > 0:
        rest = 2 * pairs + tl.arange(0, REST)[None, None, :]
        mask = inside & (rest < head_dim)
        tl.store(y + rest, tl.load(x + rest, mask=mask), mask=mask)


def kernel_rotate(x_BHLD: Tensor, cos_BLF: Tensor, sin_BLF: Tensor) -> Tensor:
    """Rotates the pairs (x_f, x_{f + F}) of the first 2F channels by their angles in fp32, and copies the others.

    Args:
        x_BHLD: queries or keys in fp16, bf16 or fp32, in any memory layout.
        cos_BLF: cosines [B or 1, L, F], with F at most D / 2; rows need not be contiguous with each other.
        sin_BLF: sines, in the same shape.

    Returns:
        [B, H, L, D] in x's dtype and memory layout.
    """
    batch, heads, length, head_dim = x_BHLD.shape
    pairs = cos_BLF.shape[-1]
    if x_BHLD.stride(-1) != 1:
        x_BHLD = x_BHLD.contiguous()
    cos_BLF, sin_BLF = (a if a.stride(-1) == 1 else a.contiguous() for a in (cos_BLF, sin_BLF))
    if cos_BLF.stride() != sin_BLF.stride():
        cos_BLF, sin_BLF = cos_BLF.contiguous(), sin_BLF.contiguous()
    y_BHLD = torch.empty_like(x_BHLD)
    if y_BHLD.numel() == 0:
        return y_BHLD
    block_pairs = triton.next_power_of_2(pairs)
    block_heads = min(triton.next_power_of_2(heads), 32, max(1, _PAIRS_A_PROGRAM // block_pairs))
    block_rows = max(1, _PAIRS_A_PROGRAM // (block_pairs * block_heads))
    rest = head_dim - 2 * pairs
    grid = (-(-length // block_rows), -(-heads // block_heads), batch)
    with on_device_of(x_BHLD):
        _kernel[grid](
            x_BHLD, y_BHLD, cos_BLF, sin_BLF, heads, length, pairs, head_dim,
            *x_BHLD.stride()[:3], *y_BHLD.stride()[:3],
            cos_BLF.stride(0) if len(cos_BLF) > 1 else 0, cos_BLF.stride(1),
            REST=triton.next_power_of_2(rest) if rest else 0,
            ROWS=block_rows, HEADS=block_heads, PAIRS=block_pairs, num_warps=4,
        )  # fmt: skip
    return y_BHLD


class _Rotation(torch.autograd.Function):
    """`kernel_rotate` with a gradient for x, which is the inverse rotation; angles get no gradient."""

    @staticmethod
    def forward(ctx: Any, x_BHLD: Tensor, cos_BLF: Tensor, sin_BLF: Tensor) -> Tensor:
        """Returns the rotated tensor."""
        ctx.save_for_backward(cos_BLF, sin_BLF)
        return kernel_rotate(x_BHLD, cos_BLF, sin_BLF)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient with respect to x, which can be differentiated again."""
        cos_BLF, sin_BLF = ctx.saved_tensors
        return _Rotation.apply(gradients[0], cos_BLF, -sin_BLF), None, None


def rotate_in_one_pass(x_BHLD: Tensor, cos_BLF: Tensor, sin_BLF: Tensor) -> Tensor:
    """`kernel_rotate`, differentiable with respect to x."""
    if not (torch.is_grad_enabled() and x_BHLD.requires_grad):
        return kernel_rotate(x_BHLD, cos_BLF, sin_BLF)
    rotated_BHLD: Tensor = _Rotation.apply(x_BHLD, cos_BLF, sin_BLF)
    return rotated_BHLD
