"""Entmax-1.5 and its gradient.

With z = (s - max s) / 2, the threshold tau lies in [-1, 0], and |max(0, z - tau)| = 1 for the Euclidean norm. That norm
is a convex, falling function of tau, so Newton's method from tau = -1 rises to the solution and never beyond it.
It takes one step if all z with a weight are equal, however many they are; Newton's method on the squared norm would
need a step for each halving of the distance.

Shape suffixes: K keys.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.linalg import vector_norm

from sbeval.models.flex import compiled_once
from sbeval.models.kernels.devices import OptionalKernel

NEWTON_STEPS = 12
"""Limit on Newton steps; the worst rows found need 8 in fp32 and 10 in fp64."""
_COMPILED_ELEMENTS = 1 << 18
_FEWEST_ROWS = 128
"""Inputs with fewer rows are compiled only up to `_LONGEST_ROW`."""
_LONGEST_ROW = 1 << 14
_compiled = OptionalKernel("A compiled threshold of entmax", "it runs uncompiled")


def newton_step(z: Tensor, tau: Tensor) -> Tensor:
    """Returns the next threshold [..., 1] for z [..., K] and the threshold [..., 1] before it."""
    above = (z - tau).clamp_min_(0)
    norm: Tensor = vector_norm(above, dim=-1, keepdim=True)
    return tau + norm * (norm - 1) / above.sum(-1, keepdim=True)


def all_newton_steps(z: Tensor) -> Tensor:
    """Returns the thresholds [..., 1] of z [..., K], whose rows have the maximum 0."""
    tau = torch.full_like(z[..., :1], -1.0)
    for _ in range(NEWTON_STEPS):
        above = (z - tau).clamp_min(0)
        norm = above.square().sum(-1, keepdim=True).sqrt()
        tau = tau + norm * (norm - 1) / above.sum(-1, keepdim=True)
    return tau


def _suits_compiled_code(z: Tensor) -> bool:
    rows, columns = z.numel() // z.shape[-1], z.shape[-1]
    # code for all shapes sums a row in one program, so few long rows would leave most of the GPU idle
    return z.numel() >= _COMPILED_ELEMENTS and (rows >= _FEWEST_ROWS or columns <= _LONGEST_ROW)


def compiled_thresholds(z: Tensor) -> Tensor:
    """Returns `all_newton_steps` from compiled code, whose matrix [rows, K] is compiled once for all shapes."""
    # a private module: if torch moves it, the threshold runs uncompiled
    import torch.fx.experimental._config as shape_config

    # dynamo would compile again for a dimension of size one, and for two dimensions that are equal only at first
    rows = z.reshape(-1, z.shape[-1]).detach()
    with shape_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        tau: Tensor = compiled_once(all_newton_steps)(rows)
    return tau.view_as(z[..., :1])


def thresholds(z: Tensor) -> Tensor:
    """Returns the thresholds [..., 1] of z [..., K], whose rows have the maximum 0.

    On a CPU the steps end once none of them changes a threshold by more than rounding. On a GPU, where asking would
    wait for the device, all `NEWTON_STEPS` are done, for large inputs in compiled code.
    """
    if z.is_cuda and _suits_compiled_code(z) and not torch.compiler.is_compiling():
        tau = _compiled.attempt(lambda: compiled_thresholds(z))
        if tau is not None:
            return tau
    tau = torch.full_like(z[..., :1], -1.0)
    tolerance = 2 * torch.finfo(z.dtype).eps
    for _ in range(NEWTON_STEPS):
        previous, tau = tau, newton_step(z, tau)
        if not z.is_cuda and bool(((tau - previous).abs() <= tolerance).all()):
            break
    return tau


class _Entmax15(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        z = (logits - logits.amax(-1, keepdim=True)).mul_(0.5)
        root = z.sub_(thresholds(z)).clamp_min_(0)
        ctx.save_for_backward(root)
        return root.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        root: Tensor = ctx.saved_tensors[0]
        product = root * gradient
        return product - root * (product.sum(-1, keepdim=True) / root.sum(-1, keepdim=True))


def entmax15(logits: Tensor) -> Tensor:
    """Returns the weights [..., K] of logits [..., K], fp32 or fp64; one logit of each row must be finite.

    Differentiable once: with r = sqrt(p), the gradient is r * g - r * sum(r * g) / sum(r) for the weights' gradient g.
    """
    weights: Tensor = _Entmax15.apply(logits)  # type: ignore[no-untyped-call]
    return weights
