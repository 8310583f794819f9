"""The kernels that benchmarks compare, under one signature: q, k, v [B, H, L, D] to the output alike.

Other packages' kernels are used where they are installed, or from a folder given; nothing of them is part of this
project.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sbeval.attention import stickbreaking_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel to measure.

    Attributes:
        attend: causal attention of q, k, v [B, H, L, D], or [B, L, H, D] where `tokens_first`.
        tokens_first: the layout this kernel takes; inputs are laid out so before they are timed.
        stick_breaking: what it computes, else softmax attention.
    """

    attend: Attend
    tokens_first: bool = False
    stick_breaking: bool = True


def softmax_attention(backend: SDPBackend) -> Attend:
    """Causal softmax attention through one of PyTorch's backends."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def flex_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention through compiled FlexAttention, as this project's FIRE and ALiBi run."""
    compiled, mask = _flex(q.shape[2], q.device)
    return cast(Tensor, compiled(q, k, v, block_mask=mask))


@cache
def _flex(length: int, device: torch.device) -> tuple[Callable[..., Any], Any]:
    from torch.nn.attention import flex_attention as flex

    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    torch._dynamo.config.recompile_limit = 64  # one for each length and head_dim
    mask = flex.create_block_mask(causal, None, None, length, length, device=device)
    return torch.compile(flex.flex_attention, dynamic=False), mask


def stick_breaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """This project's kernel, nothing skipped."""
    return stickbreaking_attention(q, k, v, impl="triton").output


def kernels(peer: Path | None) -> dict[str, Kernel]:
    """FlashAttention-2 first: others are compared with it. `peer` is a checkout of the authors' repository."""
    found = {
        "flash (SDPA)": Kernel(attend=softmax_attention(SDPBackend.FLASH_ATTENTION), stick_breaking=False),
        "cudnn (SDPA)": Kernel(attend=softmax_attention(SDPBackend.CUDNN_ATTENTION), stick_breaking=False),
        "flex": Kernel(attend=flex_attention, stick_breaking=False),
        "sbeval": Kernel(attend=stick_breaking),
    }
    for name, load in (("fla", _fla), ("authors", partial(_authors, peer))):
        try:
            found[name] = load()
        except ImportError as error:
            print(f"{name} is not measured: {error}\n")
    return found


def _fla() -> Kernel:
    from fla.ops.stickbreaking_attn import parallel_stickbreaking_attn

    return Kernel(attend=lambda q, k, v: parallel_stickbreaking_attn(q, k, v)[0], tokens_first=True)


def _authors(checkout: Path | None) -> Kernel:
    if checkout is None:
        raise ImportError("no checkout was named")
    # their kernels read plain globals, which triton refuses unless told otherwise
    os.environ["TRITON_ALLOW_NON_CONSTEXPR_GLOBALS"] = "1"
    sys.path.insert(0, str(checkout))
    from stickbreaking_attention import sb_attn

    return Kernel(attend=lambda q, k, v: sb_attn(q, k, v)[0])


def laid_out(kernel: Kernel, tensors: list[Tensor]) -> list[Tensor]:
    """Tensors [B, H, L, D] in the kernel's own layout, contiguous."""
    return [tensor.transpose(1, 2).contiguous() if kernel.tokens_first else tensor.contiguous() for tensor in tensors]


def heads_first(kernel: Kernel, tensor: Tensor) -> Tensor:
    """A tensor of the kernel's own layout as [B, H, L, D]."""
    return tensor.transpose(1, 2) if kernel.tokens_first else tensor


def forward_only(attend: Attend, inputs: list[Tensor]) -> Tensor:
    """Returns only the output."""
    with torch.no_grad():
        return attend(*inputs)


def gradients(attend: Attend, inputs: list[Tensor], d_output: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the inputs."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    return torch.autograd.grad(attend(*inputs), inputs, d_output)


def dense_inputs(
    heads: int, length: int, head_dim: int, *, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Tensor], Tensor]:
    """q, k, v whose logits lie around -9, and a gradient of the output."""
    q, k, v, d_output = (torch.randn(1, heads, length, head_dim, device=device, dtype=dtype) for _ in range(4))
    q[..., 0] = 3 * head_dim**0.25
    k[..., 0] = -3 * head_dim**0.25
    return [q, k, v], d_output


def exact_rows(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Output in fp64 of the last positions q [B, H, Q, D] against all keys."""
    q, k, v = q.double(), k.double(), v.double()
    if kernel.stick_breaking:
        return stickbreaking_attention(q, k, v, impl="reference").output
    logits = q @ k.mT * q.shape[-1] ** -0.5
    unseen = torch.ones_like(logits, dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
    return torch.softmax(logits.masked_fill(unseen, -torch.inf), -1) @ v
