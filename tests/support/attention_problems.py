"""Random problems and the error budget shared by the attention tests."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sbeval.attention import StickBreakingOutput, stickbreaking_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Inputs of one call and the gradients sent back through it."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_output: Tensor
    d_remainder: Tensor

    def to(self, dtype: torch.dtype) -> "Problem":
        return Problem(**{field.name: getattr(self, field.name).to(dtype) for field in dataclasses.fields(self)})

    def rows(self, rows: slice) -> "Problem":
        """Returns only these positions; the problem has as many queries as keys."""
        return Problem(**{field.name: getattr(self, field.name)[:, :, rows] for field in dataclasses.fields(self)})


def problem(
    *,
    batch: int = 1,
    heads: int = 2,
    groups: int = 1,
    queries: int,
    keys: int | None = None,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float64,
    logit_scale: float = 1.0,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)

    keys = queries if keys is None else keys
    return Problem(
        q=normal(batch, heads, queries, head_dim) * logit_scale,
        k=normal(batch, groups, keys, head_dim),
        v=normal(batch, groups, keys, head_dim),
        d_output=normal(batch, heads, queries, head_dim),
        d_remainder=normal(batch, heads, queries),
    )


def outputs_and_gradients(
    p: Problem, attend: Callable[..., Any] = stickbreaking_attention, **options: Any
) -> dict[str, Tensor]:
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (p.q, p.k, p.v))
    out: StickBreakingOutput = attend(q, k, v, **options)
    loss = (out.output * p.d_output).sum() + (out.remainder * p.d_remainder.to(out.remainder.dtype)).sum()
    dq, dk, dv = torch.autograd.grad(loss, (q, k, v))
    return {"output": out.output.detach(), "remainder": out.remainder.detach(), "dq": dq, "dk": dk, "dv": dv}


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """`torch.use_deterministic_algorithms`, which warns alone where there is no such algorithm."""
    torch.use_deterministic_algorithms(on, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-300))


def assert_within_budget(
    found: Tensor, exact: Tensor, rounded: Tensor, name: str, *, largest_logit: float, dtype: torch.dtype
) -> None:
    """Error against fp64 at most twice that of plain PyTorch with inputs and results rounded alike, plus rounding.

    A weight's exponent is a sum of numbers as large as the logits, so its rounding grows with them.
    """
    assert torch.isfinite(found).all(), f"{name} is not finite"
    # sums are kept in fp32 whatever the inputs' dtype; weights and results cost a part of that dtype's step, and so
    # does the remainder, which is fp32 but comes from the same weights
    rounding = (16 + largest_logit) * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps / 4
    allowed = 2 * relative_error(rounded, exact) + rounding
    error = relative_error(found, exact)
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def largest_logit(p: Problem) -> float:
    """Largest size of a logit at the default scale, in base 2."""
    k = p.k.repeat_interleave(p.q.shape[1] // p.k.shape[1], dim=1)
    return float((p.q.double() @ k.double().mT).abs().max() * p.q.shape[-1] ** -0.5 * 1.4426950408889634)


def assert_kernels_within_budget(low: Problem) -> None:
    """Results and gradients of the kernels on a problem in a low dtype, each within its error budget."""
    exact = outputs_and_gradients(low.to(torch.float64), impl="reference")
    rounded = outputs_and_gradients(low, impl="reference")
    found = outputs_and_gradients(low, impl="triton")
    limits = {"largest_logit": largest_logit(low), "dtype": low.q.dtype}
    for name in exact:
        assert_within_budget(found[name], exact[name], rounded[name].to(low.q.dtype), name, **limits)
