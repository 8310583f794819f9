"""Replaces RMSNorms by PyTorch's fused kernel, if the results agree on a sample.

transformers computes an RMSNorm by single fp32 operations, which together read and write the residual stream about ten
times. PyTorch's fused kernel reads and writes it once.
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
    """Replaces every RMSNorm that equals `torch.nn.RMSNorm` except for rounding, and returns the old modules by name.

    Each norm is compared with its replacement on a sample. Modules named RMSNorm that compute something else stay as
    they are, such as Gemma's, which add one to their weight.
    """
    return replace_modules(model, _fused_norm)


def _fused_norm(module: Any) -> nn.RMSNorm | None:
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, nn.RMSNorm):
        return None
    if type(weight) is not nn.Parameter or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # with two inputs, a norm also adds the residual
        return None
    if hasattr(module, "_hf_hook") or weight.device.type == "meta" or len(list(module.parameters())) != 1:
        return None
    fused = nn.RMSNorm(len(weight), eps, device="meta")
    fused.weight = weight
    generator = torch.Generator().manual_seed(0)
    sample = 3.0 * torch.randn(1, _SAMPLE_ROWS, len(weight), generator=generator)
    sample = sample.to(weight.device, weight.dtype)
    try:
        expected, output = module(sample), fused(sample)
    except (RuntimeError, TypeError):
        return None
    near = torch.finfo(weight.dtype).eps * _NORM_ULPS
    same = output.dtype == expected.dtype and torch.allclose(output, expected, rtol=near, atol=near * near)
    return fused if same else None


def _apply(model: nn.Module, setting: Setting) -> Undo | None:
    return give_back_modules(model, fuse_norms(model))


CHANGE = Change(name="fused norms", apply=_apply, applies_to=lambda setting: setting.replaces_modules, judged=True)
