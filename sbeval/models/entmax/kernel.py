"""adasplash's Triton kernel of causal entmax-1.5 attention (Gonçalves et al., arXiv 2502.12082 and 2604.15180).

The package `adasplash` is optional: without it, or if its kernel fails, attention runs in PyTorch. Its kernel needs a
GPU, has no bias, window or padding, and scales logits by head_dim ** -0.5, after rounding scaled queries to their
dtype. Lengths are padded to a power of two, so that a process compiles and tunes it only once for each power.

Shape suffixes: B batch, H query heads, G key/value heads, L positions, D head_dim.
"""

import functools
import importlib
import importlib.util
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sbeval.models.kernels.devices import OptionalKernel

REFINING_STEPS = 3
"""Steps of the threshold's solver after its histogram. One leaves errors of 3e-2 in a row of weights at 64K tokens, and
two reach rounding for all but flat rows."""
_HEAD_DIMS = (16, 32, 64, 128, 256)
_SHORTEST = 128
"""The backward pass handles 128 positions at a time, and writes past its buffer if padded texts are shorter."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_adasplash = OptionalKernel("adasplash", "entmax attention runs in PyTorch instead")


@functools.cache
def is_installed() -> bool:
    """Whether the package adasplash can be imported."""
    return importlib.util.find_spec("adasplash") is not None


def suits_adasplash(q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> bool:
    """Whether the kernel supports this attention without a bias, window or padding, and is installed."""
    same = q_BHQD.shape[2:] == k_BGKD.shape[2:] and k_BGKD.shape == v_BGKD.shape
    dtypes = {x.dtype for x in (q_BHQD, k_BGKD, v_BGKD)}
    fits = same and q_BHQD.shape[3] in _HEAD_DIMS and q_BHQD.shape[2] >= _SHORTEST
    known_dtype = len(dtypes) == 1 and q_BHQD.dtype in _DTYPES
    return q_BHQD.is_cuda and fits and known_dtype and not torch.compiler.is_compiling() and is_installed()


def adasplash_attention(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, *, scale: float) -> Tensor | None:
    """Computes causal entmax-1.5 attention, [B, H, L, D]; returns None if the kernel fails now or has failed before.

    `scale` is the factor of the logits. Differentiable. Unless `scale` is the kernel's own times a power of two, the
    kernel runs in fp32, since scaling bf16 or fp16 queries would round them once more.
    """
    length = q_BHLD.shape[2]
    added = (1 << (length - 1).bit_length()) - length
    factor = scale * q_BHLD.shape[3] ** 0.5
    power = 2.0 ** round(math.log2(factor)) if factor > 0 else math.nan
    exact = math.isclose(factor, power)
    dtype = q_BHLD.dtype if exact else torch.float32

    def run() -> Tensor:
        kernel: Any = importlib.import_module("adasplash.adasplash_v2").sparse_attn
        q, k, v = (x.to(dtype) for x in (q_BHLD, k_BGLD, v_BGLD))
        if factor != 1:
            q = q * (power if exact else factor)
        # zeros after the text: causal attention never sees them
        heads = (pad(x, (0, 0, 0, added)).contiguous() for x in (q, k, v))
        lengths_B = torch.full(q.shape[:1], length, dtype=torch.int32, device=q.device) if added else None
        output: Tensor = kernel(*heads, niter=REFINING_STEPS, varlen=lengths_B)
        return output[:, :, :length].to(q_BHLD.dtype)

    return _adasplash.attempt(run)
