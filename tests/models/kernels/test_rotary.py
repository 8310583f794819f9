"""Fused rotary embedding and gated activation equal their definitions; the gradient is the inverse rotation."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sbeval.models.config import PLAIN_ACTIVATIONS
from sbeval.models.kernels.gated import kernel_gated
from sbeval.models.kernels.rotary import kernel_rotate, rotate_in_one_pass
from sbeval.models.mlp import activate
from sbeval.models.rope import RopeFrequencies, cos_sin, rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU the kernel runs in Triton's interpreter
ULPS = 0.5 if torch.cuda.is_available() else 1.0  # the interpreter cuts fp32 to bf16 instead of rounding it
LAYOUTS = ("projected", "part of a projection", "heads first", "broadcast", "every other column")


def heads(layout: str, batch: int, heads: int, length: int, head_dim: int, seed: int) -> Tensor:
    """Random [batch, heads, length, head_dim] on the device, in fp64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE)

    match layout:
        case "projected":
            return normal(batch, length, heads, head_dim).transpose(1, 2)
        case "part of a projection":
            return normal(batch, length, heads + 2, head_dim)[:, :, 1 : heads + 1].transpose(1, 2)
        case "heads first":
            return normal(batch, heads, length, head_dim)
        case "broadcast":
            return normal(batch, 1, length, head_dim).expand(-1, heads, -1, -1)
    return normal(batch, heads, length, 2 * head_dim)[..., ::2]


def angles(positions: Tensor, pairs: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, 1, L, F] in fp32."""
    inv_freq = 10000.0 ** -(torch.arange(pairs, device=positions.device) / pairs)
    return cos_sin(RopeFrequencies(inv_freq, factor), positions)


def by_definition(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation in fp64, as complex numbers."""
    pairs = cos.shape[-1]
    turned = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * torch.complex(cos.double(), sin.double())
    return torch.cat([turned.real, turned.imag, x[..., 2 * pairs :]], dim=-1)


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from(LAYOUTS),
    batch=st.integers(1, 3),
    count=st.sampled_from([1, 2, 3, 33]),
    length=st.sampled_from([1, 2, 7, 65]),
    head_dim=st.sampled_from([2, 8, 32, 40, 128]),
    partial=st.booleans(),
    own_positions=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_a_rotation_is_the_definition_rounded_once(
    layout: str,
    batch: int,
    count: int,
    length: int,
    head_dim: int,
    partial: bool,
    own_positions: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    x = heads(layout, batch, count, length, head_dim, seed).to(dtype)
    pairs = max(1, head_dim // 4) if partial else head_dim // 2
    positions = torch.arange(length, device=DEVICE)[None] + 5
    if own_positions:
        positions = positions + 100 * torch.arange(batch, device=DEVICE)[:, None]
    cos, sin = angles(positions, pairs, 1.25)
    exact = by_definition(x.double(), cos, sin)
    found = kernel_rotate(x, cos[:, 0], sin[:, 0])
    assert found.dtype == dtype
    # one rounding to the dtype, after those in fp32
    rounding = ULPS * torch.finfo(dtype).eps * exact.abs() + 4e-7 * 1.25 * x.double().abs().amax() + 1e-7
    assert bool(((found.double() - exact).abs() <= rounding).all())


def test_the_result_lies_in_memory_as_the_projection_does() -> None:
    x = heads("projected", 2, 3, 5, 8, 0).float()
    cos, sin = angles(torch.arange(5, device=DEVICE)[None], 4)
    assert kernel_rotate(x, cos[:, 0], sin[:, 0]).stride() == x.stride()


def test_angles_of_half_precision_and_of_rows_that_lie_apart_are_taken_as_they_are() -> None:
    x = heads("projected", 2, 3, 5, 8, 0).float()
    cos, sin = angles(torch.arange(5, device=DEVICE)[None], 4)
    doubled = [torch.cat([a, a], dim=-1).bfloat16()[:, 0] for a in (cos, sin)]  # transformers' form
    found = kernel_rotate(x, *(a[..., :4] for a in doubled))
    exact = by_definition(x.double(), *(a[:, None, :, :4] for a in doubled))
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pairs", [4, 2])
def test_the_gradient_is_that_of_the_rotation_written_out(pairs: int) -> None:
    x = heads("projected", 2, 3, 5, 8, 1).float()
    cos, sin = angles(torch.arange(5, device=DEVICE)[None].expand(2, -1), pairs)
    weight = heads("heads first", 2, 3, 5, 8, 2).float()

    def gradient(rotation: Any) -> Tensor:
        leaf = x.clone().requires_grad_()
        (rotation(leaf).cos() * weight).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    found = gradient(lambda leaf: rotate_in_one_pass(leaf, cos[:, 0], sin[:, 0]))
    exact = gradient(lambda leaf: by_definition(leaf.double(), cos, sin).float())
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)


def test_rotation_written_out_is_the_definition() -> None:
    x = heads("projected", 2, 3, 5, 8, 3).cpu()
    cos, sin = angles(torch.arange(5)[None], 3)
    torch.testing.assert_close(rotate(x.float(), cos, sin).double(), by_definition(x.float().double(), cos, sin))


def test_no_tokens_are_rotated_to_no_tokens() -> None:
    x = torch.empty(1, 2, 0, 8, device=DEVICE)
    cos, sin = angles(torch.empty(1, 0, dtype=torch.long, device=DEVICE), 4)
    assert kernel_rotate(x, cos[:, 0], sin[:, 0]).shape == x.shape


@settings(max_examples=30, deadline=None)
@given(
    activation=st.sampled_from(PLAIN_ACTIVATIONS),
    rows=st.integers(0, 3),
    width=st.sampled_from([1, 51, 64, 1025]),
    behind=st.integers(0, 70),
    apart=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([0.1, 2.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_a_gated_activation_is_the_definition_rounded_once(
    activation: str, rows: int, width: int, behind: int, apart: int, dtype: torch.dtype, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    both = scale * torch.randn(2, 2, rows, width + apart, generator=generator)
    both[..., width:] = torch.nan  # the memory between rows belongs to no tensor
    gate, up = both.to(DEVICE, dtype)[..., :width]
    found = kernel_gated(activation, gate, up, out_width=width + behind)
    exact = activate(activation, gate.double()) * up.double()
    assert (found.dtype, found.shape) == (dtype, (2, rows, width + behind))
    assert not bool(found[..., width:].any())
    # fp32's error is relative to the gate: 1 + erf cancels where the gate is far below zero
    near = ULPS * torch.finfo(dtype).eps * exact.abs() + 1e-6 * (gate * up.float()).double().abs()
    near += torch.finfo(dtype).smallest_normal
    if dtype == torch.float16:  # values that overflow do so in PyTorch too
        exact, found = exact.clamp(-65504, 65504), found.clamp(-65504, 65504)
    assert bool(((found[..., :width].double() - exact).abs() <= near).all())


@pytest.mark.parametrize("activation", PLAIN_ACTIVATIONS)
def test_extreme_gates_give_what_pytorch_gives(activation: str) -> None:
    gate = torch.tensor([-1e38, -200.0, -0.0, 0.0, 200.0, 1e38, torch.nan], device=DEVICE)
    up = torch.ones_like(gate)
    torch.testing.assert_close(kernel_gated(activation, gate, up), activate(activation, gate), equal_nan=True)
