"""Whether two ways of computing something agree but for rounding."""

import torch
from torch import Tensor


def same_but_for_rounding(found: Tensor, expected: Tensor) -> bool:
    """Whether `found` is `expected` within the error of its dtype, relative to its largest value."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    # as `sbeval.scoring` compares a model's two halves with the whole
    rounding = torch.finfo(expected.dtype).eps ** (1.0 if expected.dtype.itemsize < 4 else 0.75)
    near = 8 * rounding * float(expected.nan_to_num().abs().max())
    return torch.allclose(found.double(), expected.double(), rtol=0.0, atol=near, equal_nan=True)
