"""The attention benchmark gives no speed to a kernel that is wrong, in its output or in any one gradient."""

from types import ModuleType

import pytest
import torch
from source_tree import ROOT
from torch import Tensor

from sbeval.attention import stickbreaking_attention

pytestmark = pytest.mark.exhaustive


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:  # pytest-benchmark has a fixture called `benchmark`
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import attention

    return attention


class _Spoiled(torch.autograd.Function):
    """A value that is right, with a gradient times a factor."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor  # type: ignore[attr-defined]
        return value.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None  # type: ignore[attr-defined]


def errors(timed: ModuleType, *, of_output: float = 1.0, of_gradients: tuple[float, ...] = (1.0,) * 3) -> list[float]:
    def attend(*tensors: Tensor) -> Tensor:
        spoiled = (_Spoiled.apply(x, factor) for x, factor in zip(tensors, of_gradients, strict=True))
        return stickbreaking_attention(*spoiled, impl="blockwise").output * of_output

    draw = torch.Generator().manual_seed(0)
    *inputs, d_output = (torch.randn(1, 2, 300, 16, generator=draw).bfloat16() for _ in range(4))
    kernel = timed.Kernel(attend=attend)
    return [timed.output_error(kernel, inputs), *timed.gradient_errors(kernel, inputs, d_output)]


def test_a_kernel_that_is_right_gets_a_speed(timed: ModuleType) -> None:
    assert timed.accurate(errors(timed))


@pytest.mark.parametrize("factor", [1.02, 0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("which", ["output", "dq", "dk", "dv"])
def test_a_kernel_that_is_wrong_gets_none(timed: ModuleType, which: str, factor: float) -> None:
    if which == "output":
        found = errors(timed, of_output=factor)
    else:
        found = errors(timed, of_gradients=tuple(factor if name == which else 1.0 for name in ("dq", "dk", "dv")))
    assert not timed.accurate(found)
