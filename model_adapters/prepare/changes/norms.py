"""RMSNorms as one kernel each, where that gives the same numbers.

Written out in fp32, as transformers has it, an RMSNorm reads and writes the residual stream about ten times; PyTorch's
fused kernel reads and writes it once.
"""

import inspect
from typing import Any

import torch
from torch import nn

from sbeval.model_adapters.prepare.change import Change, Setting, Undo
from sbeval.model_adapters.prepare.replacing import give_back_modules, replace_modules

_SAMPLE_ROWS = 4
_NORM_ULPS = 4


@torch.no_grad()
def fuse_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Replaces every RMSNorm that is PyTorch's but for rounding, and returns those replaced by their names.

    Norms of the same name that do something else (Gemma's add one to their weight) are left as they are: each is
    compared on a sample first.
    """
    return replace_modules(model, _fused_norm)


def _fused_norm(module: Any) -> nn.RMSNorm | None:
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, nn.RMSNorm):
        return None
    if type(weight) is not nn.Parameter or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # others add a residual stream too
        return None
    if hasattr(module, "_hf_hook") or weight.device.type == "meta" or len(list(module.parameters())) != 1:
        return None
    fused = nn.RMSNorm(len(weight), eps, device="meta")
    fused.weight = weight
    generator = torch.Generator().manual_seed(0)
    sample = 3.0 * torch.randn(1, _SAMPLE_ROWS, len(weight), generator=generator)
    sample = sample.to(weight.device, weight.dtype)
    try:
        expected, found = module(sample), fused(sample)
    except (RuntimeError, TypeError):
        return None
    near = torch.finfo(weight.dtype).eps * _NORM_ULPS
    same = found.dtype == expected.dtype and torch.allclose(found, expected, rtol=near, atol=near * near)
    return fused if same else None


def _apply(model: nn.Module, setting: Setting) -> Undo | None:
    return give_back_modules(model, fuse_norms(model))


CHANGE = Change(name="fused norms", apply=_apply, wanted=lambda setting: setting.replaces_parts, judged=True)
