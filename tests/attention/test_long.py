"""A million tokens, and heads 2^31 numbers apart, where there is a GPU; the same checks on small ones elsewhere."""

from collections.abc import Sequence

import pytest
import torch
from attention_problems import DEVICE, Problem, problem, relative_error
from torch import Tensor

from sbeval.attention import stickbreaking_attention

ON_GPU = DEVICE == "cuda"
TOKENS = 1_048_603 if ON_GPU else 2_053
APART = (1 << 31) + 48 if ON_GPU else 1 << 16
"""Numbers between two heads of a tensor."""
BUDGET = 2e-2 if ON_GPU else 1e-5


def long_problem() -> Problem:
    """Logits around -13 on a GPU: after a million of them some percent of the stick are still there."""
    p = problem(heads=1, queries=TOKENS, head_dim=64, dtype=torch.bfloat16 if ON_GPU else torch.float32)
    p.q[..., 0], p.k[..., 0] = 13.0, -8.0
    return p


def test_rows_of_a_long_text_equal_the_definition() -> None:
    p = long_problem()
    inputs = {"q": p.q, "k": p.k, "v": p.v}
    rows = [0, 1, TOKENS // 2 + 7, TOKENS - 1]
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    output = stickbreaking_attention(**leaves)
    d_rows = p.d_output[0, 0, rows]
    d_output = torch.zeros_like(output.output)
    d_output[0, 0, rows] = d_rows
    found = dict(zip("qkv", torch.autograd.grad(output.output, list(leaves.values()), d_output), strict=True))
    expected = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in inputs.items()}
    for row, d_row in zip(rows, d_rows, strict=True):
        seen = {name: x[:, :, : row + 1].double().requires_grad_() for name, x in inputs.items()}
        last = seen["q"][:, :, row:].detach().requires_grad_()
        exact = stickbreaking_attention(last, seen["k"], seen["v"], impl="reference")
        assert relative_error(output.output.detach()[:, :, row], exact.output.detach()[:, :, 0]) < BUDGET, row
        assert abs(float(output.remainder.detach()[0, 0, row] / exact.remainder.detach()[0, 0, 0]) - 1) < BUDGET, row
        gradients = torch.autograd.grad(exact.output, [last, seen["k"], seen["v"]], d_row.double()[None, None, None])
        expected["q"][:, :, row] += gradients[0][:, :, 0]
        expected["k"][:, :, : row + 1] += gradients[1]
        expected["v"][:, :, : row + 1] += gradients[2]
    for name in "qkv":
        assert relative_error(found[name], expected[name]) < BUDGET, name


@pytest.mark.parametrize("head_dim", [32, 64])
def test_heads_may_lie_billions_of_numbers_apart(head_dim: int) -> None:
    near = problem(heads=2, groups=2, queries=300, head_dim=head_dim, dtype=torch.float16 if ON_GPU else torch.float32)

    def apart(x: Tensor) -> Tensor:
        room = torch.empty(APART + x[:, 0].numel(), dtype=x.dtype, device=x.device)
        far = room.as_strided(x.shape, (x.shape[2] * head_dim, APART, head_dim, 1))
        return far.copy_(x)

    far = [apart(x) for x in (near.q, near.k, near.v)]
    expected = stickbreaking_attention(near.q, near.k, near.v)
    found = stickbreaking_attention(*far)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for together in zip(
        *(_gradients(tensors, near.d_output) for tensors in (far, (near.q, near.k, near.v))), strict=True
    ):
        assert relative_error(*together) < 1e-3  # keys' gradients are added in no fixed order


def _gradients(tensors: Sequence[Tensor], d_output: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(stickbreaking_attention(*leaves).output, leaves, d_output)
