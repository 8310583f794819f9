"""Linear maps of one row, with what stands around them in a block: each weight is read once, and little else.

A step of generating one text multiplies every weight by one row. What takes time beside reading the weights are small
kernels that each wait for the one before. So the norm before a map, the activation of a gated MLP, the residual stream
behind a map, and turning queries and keys and placing keys and values behind theirs, are part of the map's kernel, and
a kernel starts on its weights while the one before it ends.

Shape suffixes: E inputs of a map, F outputs or angles, G key/value heads, K room for keys, D head_dim.
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
    """How a map is launched: outputs of a program, inputs it reads at a time, its warps, and its pipeline's depth."""

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
    own = first - start + each
    if HEAD_DIM > 0:
        head = (first - start) // HEAD_DIM
        dim = (first - start) % HEAD_DIM
        # angle f turns numbers f and f + PAIRS of a head, which one program computes; those behind 2 * PAIRS stay
        turns = (part < 2) & (dim < 2 * PAIRS)
        HALF: tl.constexpr = BLOCK_F // 2
        angle = dim // 2 + each % HALF
        dim = tl.where(turns, angle + each // HALF * PAIRS, dim + each)
        own = head * HEAD_DIM + dim
    column = start + own
    real = own < outputs
    weight_at = weight + own.to(tl.int64)[:, None] * weight_stride
    other_at = weight_1 + own.to(tl.int64)[:, None] * weight_stride_1
    at = tl.arange(0, BLOCK_E)
    there = at < inputs
    w = tl.load(weight_at + at[None, :], mask=real[:, None] & there[None, :], other=0.0)
    if ACTIVATION != "":
        u = tl.load(other_at + at[None, :], mask=real[:, None] & there[None, :], other=0.0)
    if EARLY:
        # weights are there at any time; the row is what the kernel before leaves
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
    squares = x * x
    if NORM:
        x *= tl.load(norm_ptr + at, mask=there, other=0.0).to(tl.float32)
    total = w.to(tl.float32) * x[None, :]
    if ACTIVATION != "":
        other = u.to(tl.float32) * x[None, :]
    for begin in tl.range(BLOCK_E, inputs, BLOCK_E, num_stages=STAGES):
        at = begin + tl.arange(0, BLOCK_E)
        there = at < inputs
        w = tl.load(weight_at + at[None, :], mask=real[:, None] & there[None, :], other=0.0)
        x = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + at, mask=there, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * x[None, :]
        if ACTIVATION != "":
            u = tl.load(other_at + at[None, :], mask=real[:, None] & there[None, :], other=0.0)
            other += u.to(tl.float32) * x[None, :]
    shrunk = tl.rsqrt(tl.sum(squares, 0) / norm_inputs + eps) if NORM else 1.0
    result = tl.sum(total, 1) * shrunk
    if BIAS:
        result += tl.load(bias + own, mask=real, other=0.0).to(tl.float32)
    if ACTIVATION != "":
        gated = tl.sum(other, 1) * shrunk
        if BIAS:
            gated += tl.load(bias_1 + own, mask=real, other=0.0).to(tl.float32)
        if ACTIVATION == "silu":
            result = result / (1.0 + tl.exp(-result)) * gated
        else:
            result = 0.5 * result * (1.0 + tl.erf(result * 0.7071067811865476)) * gated
    # a gated map writes zeros behind its outputs, for a map that reads wider rows
    mask = column < width if ACTIVATION != "" else real
    result *= scale
    if ADD:
        result += tl.load(out_ptr + column, mask=mask, other=0.0).to(tl.float32)
    result = result.to(out_ptr.dtype.element_ty)
    at = out_ptr + column
    if HEAD_DIM > 0:
        if PAIRS > 0:  # noqa: SIM102 - one is known when the kernel is compiled, the other is not
            if turns:
                a, b = tl.split(tl.trans(tl.reshape(result.to(tl.float32), [2, HALF])))
                own_angle = (first - start) % HEAD_DIM // 2 + tl.arange(0, HALF)
                c = tl.load(cos_ptr + own_angle).to(tl.float32)
                s = tl.load(sin_ptr + own_angle).to(tl.float32)
                turned = tl.join(a * c - b * s, b * c + a * s)
                result = tl.reshape(tl.trans(turned), [BLOCK_F]).to(out_ptr.dtype.element_ty)
        if part > 0:
            tl.store(at, result, mask=mask)
            # a room smaller than the text is a ring of its newest keys
            place = tl.load(position_ptr).to(tl.int64) % room
            far = head.to(tl.int64)  # heads of a long room lie far apart
            at = k_ptr + far * k_h + place * k_l + dim
            if part > 1:
                at = v_ptr + far * v_h + place * v_l + dim
    tl.store(at, result, mask=mask)


def map_parameters(*, outputs: int, inputs: int, gated: bool) -> MapParameters:
    """How to launch a map: what made a whole step fastest on an H200, for maps of 1536 to 5632 numbers."""
    if os.environ.get("TRITON_INTERPRET") == "1":  # which takes as long for a small program as for a large one
        return MapParameters(block_outputs=32, block_inputs=512, num_warps=4, num_stages=2)
    if gated:
        block_inputs, num_stages = (256, 4) if inputs < 2048 else (512, 2)
        return MapParameters(block_outputs=8, block_inputs=block_inputs, num_warps=4, num_stages=num_stages)
    if outputs > inputs:
        return MapParameters(block_outputs=4, block_inputs=512, num_warps=2, num_stages=4)
    return MapParameters(block_outputs=8, block_inputs=2048, num_warps=8, num_stages=2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where keys and values of the newest position of a text belong.

    Rooms have contiguous last dimensions; the place is `position_1`, integers on the device, modulo the room. Angles
    turn the first 2 F numbers of each query and key, and None turns none.
    """

    k_GKD: Tensor
    v_GKD: Tensor
    position_1: Tensor
    cos_F: Tensor | None = None
    sin_F: Tensor | None = None

    @property
    def pairs(self) -> int:
        """F, 0 where nothing turns."""
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
    """Writes linear maps of one row, as wide as is read of a weight's rows, into `out`, and returns it.

    `weights_FE` are up to three maps whose outputs stand side by side, each of a multiple of 32 outputs but for the
    last; or with an activation, "silu" or "gelu", those of the gate and of what it is applied to. Rows may lie apart.
    `out` is [1, F] and contiguous; with an activation, columns beyond the outputs become zeros. With `add`, the result
    is added to what it holds. `norm_E` and `eps` are of an RMSNorm that stands before the maps. With a `slot`, the maps
    are those of queries, keys and values: queries and keys are turned, keys and values placed as well.
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
        # a program's outputs are of one head, and all of them turn or none
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
