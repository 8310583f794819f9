"""RMSNorms of transformers' models as PyTorch's fused kernel, where that gives the same numbers.

Written out in fp32, as transformers has it, a norm reads and writes the residual stream some ten times.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from sbeval.model_adapters.speed.replacing import replace_modules

_SAMPLE_ROWS = 4
_ULPS = 4


class FusedRMSNorm(nn.Module):
    """RMSNorm over the last dimension.

    Args:
        weight: [D], shared with the norm this stands in for.
        eps: added to the mean square.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] to the same."""
        return rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


@torch.no_grad()
def fuse_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Replaces every RMSNorm that is PyTorch's but for rounding, and returns those replaced by their names.

    Norms of the same name that do something else (Gemma's add one to their weight) are left as they are: each is
    compared on a sample first.
    """
    return replace_modules(model, _fused)


def _fused(module: Any) -> FusedRMSNorm | None:
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, nn.RMSNorm | FusedRMSNorm):
        return None
    if type(weight) is not nn.Parameter or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # others add a residual stream too
        return None
    if hasattr(module, "_hf_hook") or weight.device.type == "meta" or len(list(module.parameters())) != 1:
        return None
    fused = FusedRMSNorm(weight, eps)
    generator = torch.Generator().manual_seed(0)
    sample = 3.0 * torch.randn(1, _SAMPLE_ROWS, len(weight), generator=generator)
    sample = sample.to(weight.device, weight.dtype)
    try:
        expected, found = module(sample), fused(sample)
    except (RuntimeError, TypeError):
        return None
    near = torch.finfo(weight.dtype).eps * _ULPS
    same = found.dtype == expected.dtype and torch.allclose(found, expected, rtol=near, atol=near * near)
    return fused if same else None
