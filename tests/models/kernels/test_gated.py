"""The gated activation in one pass is the one written out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbeval.models.config import PLAIN_ACTIVATIONS
from sbeval.models.kernels.gated import kernel_gated
from sbeval.models.mlp import activate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU the kernel runs in Triton's interpreter
ULPS = 0.5 if torch.cuda.is_available() else 1.0  # the interpreter cuts fp32 to bf16 instead of rounding it


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
    both[..., width:] = torch.nan  # what lies between rows is nobody's
    gate, up = both.to(DEVICE, dtype)[..., :width]
    found = kernel_gated(activation, gate, up, out_width=width + behind)
    exact = activate(activation, gate.double()) * up.double()
    assert found.dtype == dtype
    assert found.shape == (2, rows, width + behind)
    assert not bool(found[..., width:].any())
    # fp32's error is relative to the gate: 1 + erf cancels where the gate is far below zero
    near = ULPS * torch.finfo(dtype).eps * exact.abs() + 1e-6 * (gate * up.float()).double().abs()
    near += torch.finfo(dtype).smallest_normal
    if dtype == torch.float16:  # what overflows does so in PyTorch too
        exact, found = exact.clamp(-65504, 65504), found.clamp(-65504, 65504)
    assert bool(((found[..., :width].double() - exact).abs() <= near).all())


@pytest.mark.parametrize("activation", PLAIN_ACTIVATIONS)
def test_extreme_gates_give_what_pytorch_gives(activation: str) -> None:
    gate = torch.tensor([-1e38, -200.0, -0.0, 0.0, 200.0, 1e38, torch.nan], device=DEVICE)
    up = torch.ones_like(gate)
    torch.testing.assert_close(kernel_gated(activation, gate, up), activate(activation, gate), equal_nan=True)
