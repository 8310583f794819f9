"""Applies the rotary embeddings of transformers' attention modules with one fused kernel.

The forward of an attention module calls the global function `apply_rotary_pos_emb` of its file. Each module gets a copy
of its forward in which this name means the fused kernel. transformers itself and other models are not changed.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from sbeval.model_adapters.prepare.change import Change, Setting, Undo
from sbeval.model_adapters.prepare.replacing import Forward, give_back_forwards, with_forwards, with_name
from sbeval.models.kernels.devices import runs_triton
from sbeval.models.rope import rotate

_ROTATION = "apply_rotary_pos_emb"


class FusedRotation:
    """Replaces `apply_rotary_pos_emb`, and calls the original for inputs for which the kernel would be wrong."""

    def __init__(self, fallback: Forward) -> None:
        self._fallback = fallback

    def __call__(self, q_BHLD: Tensor, k_BGLD: Tensor, cos_BLD: Tensor, sin_BLD: Tensor, *args: Any, **kw: Any) -> Any:
        """Returns the rotated queries and keys. In the tables of cosine and sine, both halves of D are the same."""
        plain = args or kw or not cos_BLD.dtype == q_BHLD.dtype == k_BGLD.dtype
        plain = plain or not all(_angles_fit(x, cos_BLD, sin_BLD) for x in (q_BHLD, k_BGLD))
        if plain or q_BHLD.dtype == torch.float64 or not runs_triton(q_BHLD):
            return self._fallback(q_BHLD, k_BGLD, cos_BLD, sin_BLD, *args, **kw)
        # imported here because triton is not installed on every machine
        from sbeval.models.kernels.rotary import rotate_in_one_pass

        pairs = cos_BLD.shape[-1] // 2
        cos_BLF, sin_BLF = cos_BLD[..., :pairs], sin_BLD[..., :pairs]
        return tuple(rotate_in_one_pass(x, cos_BLF, sin_BLF) for x in (q_BHLD, k_BGLD))


def _angles_fit(x_BHLD: Tensor, cos_BLD: Tensor, sin_BLD: Tensor) -> bool:
    """Whether the kernel can broadcast the tables: their batch size is that of the queries or keys, or 1."""
    if x_BHLD.dim() != 4 or cos_BLD.dim() != 3 or cos_BLD.shape != sin_BLD.shape:
        return False
    texts, positions, rotated = cos_BLD.shape
    return texts in (1, len(x_BHLD)) and positions == x_BHLD.shape[2] and rotated <= x_BHLD.shape[3]


def fuse_rotations(model: nn.Module) -> list[nn.Module]:
    """Makes attention modules use the fused kernel if they rotate as it does, and returns the changed modules."""
    # skips a module whose forward accelerate or the caller has replaced
    return with_forwards(model, lambda module: None if "forward" in vars(module) else _rotating(type(module).forward))


@functools.cache
def _rotating(forward: Forward) -> Forward | None:
    return with_name(forward, _ROTATION, lambda rotate: FusedRotation(rotate) if turns_halves(rotate) else None)


@torch.no_grad()
def turns_halves(rotate_pairs: Forward) -> bool:
    """Whether a function rotates the pairs (x_f, x_{f + F}) of 2F channels, as most models do, and not neighbours."""
    generator = torch.Generator().manual_seed(0)
    q_BHLD, k_BGLD = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (2, 1))
    cos_BLF, sin_BLF = torch.randn(2, 2, 3, 4, generator=generator)
    try:
        rotated = rotate_pairs(q_BHLD, k_BGLD, *(torch.cat([a, a], dim=-1) for a in (cos_BLF, sin_BLF)))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    expected = (rotate(x, cos_BLF[:, None], sin_BLF[:, None]) for x in (q_BHLD, k_BGLD))
    return isinstance(rotated, tuple) and all(
        isinstance(f, Tensor) and f.shape == e.shape and torch.allclose(f, e, atol=1e-5)
        for f, e in zip(rotated, expected, strict=False)
    )


def _apply(model: nn.Module, setting: Setting) -> Undo | None:
    return functools.partial(give_back_forwards, changed) if (changed := fuse_rotations(model)) else None


CHANGE = Change(name="fused rotations", apply=_apply, applies_to=lambda setting: setting.replaces_modules, judged=True)
