"""What `kernels` loads from the folder above is the definition, its gradients too, on the device at hand."""

from pathlib import Path

import kernels
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32 if DEVICE == "cuda" else torch.float64
NEAR = {"rtol": 1e-3, "atol": 1e-4} if DEVICE == "cuda" else {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(scope="module")
def package():
    return kernels.get_local_kernel(Path(__file__).parents[1], trust_remote_code=True)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("attend_current", [False, True])
def test_weights_are_those_of_the_definition(package, attend_current):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 70, 32, device=DEVICE, dtype=DTYPE) for heads in (4, 2, 2))
    output, remainder = package.stickbreaking_attention(q, k, v, attend_current=attend_current)
    share = torch.sigmoid((q @ k.repeat_interleave(2, 1).mT).double() / 32**0.5)
    share = share.tril(0 if attend_current else -1)
    left = (1 - share).flip(-1).cumprod(-1).flip(-1)
    weights = share * torch.nn.functional.pad(left[..., 1:], (0, 1), value=1.0)
    torch.testing.assert_close(output.double(), weights @ v.repeat_interleave(2, 1).double(), **NEAR)
    torch.testing.assert_close(remainder.double(), 1 - weights.sum(-1), **NEAR)


@pytest.mark.kernels_ci
def test_gradients_are_those_of_the_definition(package):
    torch.manual_seed(1)
    inputs = [torch.randn(1, 2, 40, 32, device=DEVICE, dtype=DTYPE, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(1, 2, 40, 32, device=DEVICE, dtype=DTYPE)
    gradients = [
        torch.autograd.grad(package.stickbreaking_attention(*inputs, impl=impl).output, inputs, upstream)
        for impl in ("auto", "reference")
    ]
    for mine, defined in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, defined, **NEAR)
