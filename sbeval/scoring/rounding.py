"""How far logits lie apart, and how far a model's own rounding moves them.

Shape suffixes: L positions, V vocabulary.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_EPS_OF_TF32 = 2.0**-10
_LEAST_EPS = 4.0


def shares_apart(found_LV: Tensor, expected_LV: Tensor) -> Tensor:
    """Returns the difference at each position, float64 [L], as a share of the spread of the expected logits there.

    Infinity stands where NaN is found. Logits that are expected to be infinite, such as those of masked tokens, are
    left out.
    """
    expected_LV, found_LV = expected_LV.double(), found_LV.double().to(expected_LV.device)
    numbers_LV = expected_LV.isfinite()

    def size(x_LV: Tensor) -> Tensor:
        return torch.where(numbers_LV, x_LV, 0.0).square().sum(-1).sqrt()

    mean_L1 = torch.where(numbers_LV, expected_LV, 0.0).sum(-1, keepdim=True) / numbers_LV.sum(-1, keepdim=True)
    shares_L = size(found_LV - expected_LV) / size(expected_LV - mean_L1).clamp_min(torch.finfo(torch.float32).tiny)
    return shares_L.nan_to_num(nan=torch.inf)


def least(dtype: torch.dtype, device: torch.device) -> float:
    """Returns a difference that rounding explains in every model, as a share of the logits' spread.

    A model whose logits hardly show its rounding may still add in another order.
    """
    eps = torch.finfo(dtype).eps
    if device.type == "cuda" and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
        eps = max(eps, _EPS_OF_TF32)
    return _LEAST_EPS * eps if eps >= _EPS_OF_TF32 else 8 * eps**0.75


@contextlib.contextmanager
def rounded_anew(model: nn.Module, *, seed: int, times: float) -> Iterator[None]:
    """Within it the output of every module without submodules is rounded once more, at random, up or down.

    The error is at most `times` the largest error of rounding to the output's dtype.
    """
    device: Any = model.device
    generator = torch.Generator(device).manual_seed(seed)

    def moved(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        far = times * torch.finfo(output.dtype).eps / 2
        share = torch.empty(output.shape, dtype=torch.float32, device=device)
        share.uniform_(1 - far, 1 + far, generator=generator)
        return (output * share.to(output.device)).to(output.dtype)

    leaves = (module for module in model.modules() if not list(module.children()))
    hooks = [module.register_forward_hook(moved) for module in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
