"""Matrix-vector kernels for a decode step with batch size 1: linear layers fused with the operations around them.

Such a step is bound by reading the weights, and otherwise slowed by small kernels that wait for each other. So one
kernel computes a linear layer together with the RMSNorm before it and the gated activation or residual addition after
it. For the query, key and value projections it also applies the rotary embedding and writes keys and values into the
KV cache. With programmatic dependent launch, a kernel loads its weights while the previous kernel ends.

Shape suffixes: E inputs of a linear layer, F outputs or rotary angles, G key/value heads, K capacity of the KV cache in
keys, D head_dim.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

import dataclasses
import math
import os
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sbeval.attention.impl.triton.hardware import on_device_of, starts_early


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MapParameters:
    """Launch parameters of the kernel: outputs of a program, inputs of a tile, warps, and pipeline stages."""

    block_outputs: int
    block_inputs: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["outputs_0", "outputs_1", "outputs_2", "width", "room"])
def _map_kernel(
    x_ptr, norm_ptr, weight_0, weight_1, weight_2, bias_0, bias_1, bias_2, out_ptr,
    k_ptr, v_ptr, position_ptr, cos_ptr, sin_ptr,
    inputs, outputs_0, outputs_1, outputs_2, width, norm_inputs, eps, scale,
    weight_stride_0, weight_stride_1, weight_stride_2, room, k_h, k_l, v_h, v_l,
    BLOCK_F: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_F
    each = tl.arange(0, BLOCK_F)
    weight, bias, outputs, weight_stride, start, part = weight_0, bias_0, outputs_0, weight_stride_0, 0, 0
    if PARTS > 1 and first >= outputs_0:
        weight, bias, outputs, weight_stride, start = weight_1, bias_1, outputs_1, weight_stride_1, outputs_0
        part = 1
        if PARTS > 2 and first >= outputs_0 + outputs_1:
            weight, bias, outputs, weight_stride = weight_2, bias_2, outputs_2, weight_stride_2
            start = outputs_0 + outputs_1
            part = 2
    local = first - start + each
    if HEAD_DIM > 0:
        head = (first - start) // HEAD_DIM
        dim = (first - start) % HEAD_DIM
        # angle f rotates channels f and f + PAIRS of a head, so one program computes both; channels from 2 * PAIRS on
        # are not rotated
        turns = (part < 2) & (dim < 2 * PAIRS)
        HALF: tl.constexpr = BLOCK_F // 2
        angle = dim // 2 + each % HALF
        dim = tl.where(turns, angle + each // HALF * PAIRS, dim + each)
        local = head * HEAD_DIM + dim
    column = start + local
    real = local < outputs
    weight_at = weight + local.to(tl.int64)[:, None] * weight_stride
    other_at = weight_1 + local.to(tl.int64)[:, None] * weight_stride_1
    at = tl.arange(0, BLOCK_E)
    in_bounds = at < inputs
    w = tl.load(weight_at + at[None, :], mask=real[:, None] & in_bounds[None, :], other=0.0)
    if ACTIVATION != "":
        u = tl.load(other_at + at[None, :], mask=real[:, None] & in_bounds[None, :], other=0.0)
    if EARLY:
        # the weights are constant and were loaded before; the input row is written by the previous kernel
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + at, mask=in_bounds, other=0.0).to(tl.float32)
    squares = x * x
    if NORM:
        x *= tl.load(norm_ptr + at, mask=in_bounds, other=0.0).to(tl.float32)
    total = w.to(tl.float32) * x[None, :]
    if ACTIVATION != "":
        other = u.to(tl.float32) * x[None, :]
    for begin in tl.range(BLOCK_E, inputs, BLOCK_E, num_stages=STAGES):
        at = begin + tl.arange(0, BLOCK_E)
        in_bounds = at < inputs
        w = tl.load(weight_at + at[None, :], mask=real[:, None] & in_bounds[None, :], other=0.0)
        x = tl.load(x_ptr + at, mask=in_bounds, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + at, mask=in_bounds, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * x[None, :]
        if ACTIVATION != "":
            u = tl.load(other_at + at[None, :], mask=real[:, None] & in_bounds[None, :], other=0.0)
            other += u.to(tl.float32) * x[None, :]
    shrunk = tl.rsqrt(tl.sum(squares, 0) / norm_inputs + eps) if NORM else 1.0
    result = tl.sum(total, 1) * shrunk
    if BIAS:
        result += tl.load(bias + local, mask=real, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        gated = tl.sum(other, 1) * shrunk
        if BIAS:
            gated += tl.load(bias_1 + local, mask=real, other=0.0).to(tl.float32)
        if ACTIVATION == "silu":
            result = result / (1.0 + tl.exp(-result)) * gated
        else:
            result = 0.5 * result * (1.0 + tl.erf(result * 0.7071067811865476)) * gated
    # a gated layer pads its output with zeros, for a next layer that reads wider rows
    mask = column < width if ACTIVATION != "" else real
    result *= scale
    if ADD:
        result += tl.load(out_ptr + column, mask=mask, other=0.0).to(tl.float32)
    result = result.to(out_ptr.dtype.element_ty)
    at = out_ptr + column
    if HEAD_DIM > 0:
        if PAIRS > 0:  # noqa: SIM102 - PAIRS is a compile-time constant, `turns` is not
            if turns:
                a, b = tl.split(tl.trans(tl.reshape(result.to(tl.float32), [2, HALF])))
                local_angle = (first - start) % HEAD_DIM // 2 + tl.arange(0, HALF)
                c = tl.load(cos_ptr + local_angle).to(tl.float32)
                s = tl.load(sin_ptr + local_angle).to(tl.float32)
                turned = tl.join(a * c - b * s, b * c + a * s)
                result = tl.reshape(tl.trans(turned), [BLOCK_F]).to(out_ptr.dtype.element_ty)
        if part > 0:
            tl.store(at, result, mask=mask)
            # a cache smaller than the text is a ring buffer of the newest keys
            place = tl.load(position_ptr).to(tl.int64) % room
            far = head.to(tl.int64)  # int64, since offsets between heads of a long cache exceed int32
            at = k_ptr + far * k_h + place * k_l + dim
            if part > 1:
                at = v_ptr + far * v_h + place * v_l + dim
    tl.store(at, result, mask=mask)


def map_parameters(*, outputs: int, inputs: int, gated: bool) -> MapParameters:
    """Returns the launch parameters that made a decode step fastest on an H200, for widths of 1536 to 5632."""
    if os.environ.get("TRITON_INTERPRET") == "1":  # the interpreter takes as long for a small tile as for a large one
        return MapParameters(block_outputs=32, block_inputs=512, num_warps=4, num_stages=2)
    if gated:
        block_inputs, num_stages = (256, 4) if inputs < 2048 else (512, 2)
        return MapParameters(block_outputs=8, block_inputs=block_inputs, num_warps=4, num_stages=num_stages)
    if outputs > inputs:
        return MapParameters(block_outputs=4, block_inputs=512, num_warps=2, num_stages=4)
    return MapParameters(block_outputs=8, block_inputs=2048, num_warps=8, num_stages=2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The cache entry into which the kernel writes a new key and value, and the rotary angles of its position.

    Attributes:
        k_GKD: cached keys of one text; the last dimension is contiguous.
        v_GKD: cached values of the text; the last dimension is contiguous.
        position_1: position of the new token, an integer on the device; the index in the cache is this modulo K.
        cos_F: cosines for the first 2 F channels of each query and key; None applies no rotation.
        sin_F: sines for the same channels.
    """

    k_GKD: Tensor
    v_GKD: Tensor
    position_1: Tensor
    cos_F: Tensor | None = None
    sin_F: Tensor | None = None

    @property
    def pairs(self) -> int:
        """Number of rotated pairs of channels (F); 0 without rotation."""
        return 0 if self.cos_F is None else len(self.cos_F)


def map_row(
    x_1E: Tensor,
    weights_FE: Sequence[Tensor],
    biases_F: Sequence[Tensor] | None = None,
    *,
    out: Tensor,
    norm_E: Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    scale: float = 1.0,
    add: bool = False,
    slot: Slot | None = None,
    parameters: MapParameters | None = None,
) -> Tensor:
    """Applies linear layers to one row and writes their outputs into `out`.

    Args:
        x_1E: the input row; only the first E columns of the weights are read.
        weights_FE: weights of up to three layers whose outputs are concatenated; each but the last has a multiple of 32
            outputs. With an activation: the weights of gate and up projection. Rows need not be contiguous with each
            other.
        biases_F: biases of the layers, or None.
        out: [1, F], contiguous. With an activation, columns beyond the layers' outputs become zeros.
        norm_E: weights of an RMSNorm that is applied to the row first, or None.
        eps: epsilon of that norm.
        activation: "silu" or "gelu" for a gated MLP, "" for none.
        scale: factor of the outputs.
        add: add the outputs to the values in `out` instead of overwriting them.
        slot: for the query, key and value projections: rotates queries and keys, and also writes keys and values into
            the KV cache.
        parameters: launch parameters; None means `map_parameters`.

    Returns:
        `out`.
    """
    outputs = [len(weight) for weight in weights_FE]
    p = parameters or map_parameters(outputs=sum(outputs), inputs=x_1E.shape[1], gated=bool(activation))
    width = out.shape[1] if activation else sum(outputs)
    weights = [*weights_FE, *[weights_FE[0]] * (3 - len(weights_FE))]
    biases = [*biases_F, *[biases_F[0]] * (3 - len(biases_F))] if biases_F else weights
    counts = [*outputs, *[0] * (3 - len(outputs))]
    early = starts_early(x_1E)
    block_outputs, head_dim, places = p.block_outputs, 0, (out, out, out, out, out)
    strides: tuple[int, ...] = (1, 0, 0, 0, 0)
    if slot is not None:
        head_dim = slot.k_GKD.shape[2]
        # the outputs of a program belong to one head, and either all or none of them are rotated
        block_outputs = math.gcd(block_outputs, head_dim, 2 * slot.pairs)
        cos, sin = (out, out) if slot.cos_F is None or slot.sin_F is None else (slot.cos_F, slot.sin_F)
        places = (slot.k_GKD, slot.v_GKD, slot.position_1, cos, sin)
        strides = (slot.k_GKD.shape[1], *slot.k_GKD.stride()[:2], *slot.v_GKD.stride()[:2])
    with on_device_of(x_1E):
        _map_kernel[(-(-width // block_outputs),)](
            x_1E, x_1E if norm_E is None else norm_E, *weights, *biases, out, *places,
            x_1E.shape[1], *counts, width, x_1E.shape[1] if norm_E is None else len(norm_E), eps, scale,
            *(weight.stride(0) for weight in weights), *strides,
            BLOCK_F=block_outputs, BLOCK_E=p.block_inputs, STAGES=p.num_stages,
            PARTS=1 if activation else len(weights_FE), ACTIVATION=activation, NORM=norm_E is not None,
            BIAS=bool(biases_F), ADD=add, EARLY=early,
            HEAD_DIM=head_dim, PAIRS=0 if slot is None else slot.pairs, num_warps=p.num_warps,
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out
