"""Relative differences between logits, and how large a difference can come from rounding.

Shape suffixes: L positions, V vocabulary.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

AT_ONCE_NUMBERS = 2**24
"""How many numbers of a module's output get random errors at a time; their fp32 copies take 128 MiB."""
_EPS_OF_TF32 = 2.0**-10
_LEAST_EPS = 4.0


def shares_apart(found_LV: Tensor, expected_LV: Tensor) -> Tensor:
    """Returns the relative difference of two models' logits at each position, float64 [L].

    It is the norm of the difference, divided by the norm of the expected logits minus their mean. It is infinite at
    positions at which `found_LV` holds NaN. Tokens whose expected logit is infinite, such as masked tokens, are left
    out.
    """
    expected_LV, found_LV = expected_LV.double(), found_LV.double().to(expected_LV.device)
    numbers_LV = expected_LV.isfinite()

    def size(x_LV: Tensor) -> Tensor:
        return torch.where(numbers_LV, x_LV, 0.0).square().sum(-1).sqrt()

    mean_L1 = torch.where(numbers_LV, expected_LV, 0.0).sum(-1, keepdim=True) / numbers_LV.sum(-1, keepdim=True)
    shares_L = size(found_LV - expected_LV) / size(expected_LV - mean_L1).clamp_min(torch.finfo(torch.float32).tiny)
    return shares_L.nan_to_num(nan=torch.inf)


def least(dtype: torch.dtype, device: torch.device) -> float:
    """Returns a relative difference (see `shares_apart`) that can come from rounding in any model with this dtype.

    It is a lower bound for tolerances that are measured with `rounded_anew`: even if random rounding hardly changes a
    model's logits, another order of summation may.
    """
    eps = torch.finfo(dtype).eps
    if device.type == "cuda" and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
        eps = max(eps, _EPS_OF_TF32)
    return _LEAST_EPS * eps if eps >= _EPS_OF_TF32 else 8 * eps**0.75


@contextlib.contextmanager
def rounded_anew(model: nn.Module, *, seed: int, times: float) -> Iterator[None]:
    """Inside this context, random rounding errors are added to the output of every module without submodules.

    Each error is at most `times` the largest error of rounding to the output's dtype. `seed` fixes the random numbers.
    """
    device: Any = model.device
    generator = torch.Generator(device).manual_seed(seed)

    def add_rounding(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        largest_error = times * torch.finfo(output.dtype).eps / 2
        rounded = torch.empty_like(output, memory_format=torch.contiguous_format)
        numbers, rounded_numbers = output.flatten(), rounded.view(-1)
        for begin in range(0, len(numbers), AT_ONCE_NUMBERS):
            chunk = slice(begin, begin + AT_ONCE_NUMBERS)
            factor = torch.empty(numbers[chunk].shape, dtype=torch.float32, device=device)
            factor.uniform_(1 - largest_error, 1 + largest_error, generator=generator)
            rounded_numbers[chunk] = numbers[chunk] * factor.to(output.device)
        return rounded

    leaves = (module for module in model.modules() if not list(module.children()))
    hooks = [module.register_forward_hook(add_rounding) for module in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
