"""Attention of transformers' models with faster parts: rotary embeddings as one kernel, another kernel for long texts.

The forward of an attention calls `apply_rotary_pos_emb` of its file by that name, and looks its kernel up in
`ALL_ATTENTION_FUNCTIONS`. That forward is kept: a module gets a copy of it in which a name means something else, and
transformers and other models stay as they are.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sbeval.model_adapters.speed.replacing import Forward, with_name
from sbeval.models.kernels.devices import runs_triton
from sbeval.models.rope import rotate
from sbeval.models.softmax import long_causal_attention

_ROTATION = "apply_rotary_pos_emb"
_TABLE = "ALL_ATTENTION_FUNCTIONS"
_CHANGING = ("softcap", "position_bias", "sliding_window", "cache", "s_aux", "output_attentions")
"""Keywords that ask for more than plain attention, or might."""
LongAttention = Callable[..., Tensor | None]


class FusedRotation:
    """Stands in for `apply_rotary_pos_emb`, and calls it where the kernel would not do the same."""

    def __init__(self, own: Forward) -> None:
        self._own = own

    def __call__(self, q_BHLD: Tensor, k_BGLD: Tensor, cos_BLD: Tensor, sin_BLD: Tensor, *args: Any, **kw: Any) -> Any:
        """Returns the rotated queries and keys; cosine and sine hold each of their values twice."""
        plain = args or kw or not cos_BLD.dtype == q_BHLD.dtype == k_BGLD.dtype
        plain = plain or not all(_angles_fit(x, cos_BLD, sin_BLD) for x in (q_BHLD, k_BGLD))
        if plain or q_BHLD.dtype == torch.float64 or not runs_triton(q_BHLD):
            return self._own(q_BHLD, k_BGLD, cos_BLD, sin_BLD, *args, **kw)
        # triton, which runs on a GPU and is not on every machine
        from sbeval.models.kernels.rotary import rotate_in_one_pass

        pairs = cos_BLD.shape[-1] // 2
        cos_BLF, sin_BLF = cos_BLD[..., :pairs], sin_BLD[..., :pairs]
        return tuple(rotate_in_one_pass(x, cos_BLF, sin_BLF) for x in (q_BHLD, k_BGLD))


def _angles_fit(x_BHLD: Tensor, cos_BLD: Tensor, sin_BLD: Tensor) -> bool:
    """Whether there is an angle for each position, or one row of them for all texts: the kernel broadcasts no more."""
    if x_BHLD.dim() != 4 or cos_BLD.dim() != 3 or cos_BLD.shape != sin_BLD.shape:
        return False
    texts, positions, rotated = cos_BLD.shape
    return texts in (1, len(x_BHLD)) and positions == x_BHLD.shape[2] and rotated <= x_BHLD.shape[3]


def fuse_rotations(model: nn.Module) -> list[nn.Module]:
    """Gives every attention module whose rotation is of the kernel's kind the kernel, and returns those modules."""
    # a forward of its own is accelerate's, or a caller's
    return _with_forwards(model, lambda module: None if "forward" in vars(module) else _rotating(type(module).forward))


def _with_forwards(model: nn.Module, stand_in: Callable[[nn.Module], Forward | None]) -> list[nn.Module]:
    """Gives modules the forward that `stand_in` returns, if not None, and returns those modules."""
    changed = []
    for module in model.modules():
        if (forward := stand_in(module)) is not None:
            module.forward = types.MethodType(forward, module)
            changed.append(module)
    return changed


@functools.cache
def _rotating(forward: Forward) -> Forward | None:
    return with_name(forward, _ROTATION, lambda own: FusedRotation(own) if turns_halves(own) else None)


@torch.no_grad()
def turns_halves(own: Forward) -> bool:
    """Whether a function rotates pairs (x_f, x_{f + F}), as most models do; some rotate neighbours."""
    generator = torch.Generator().manual_seed(0)
    q_BHLD, k_BGLD = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (2, 1))
    cos_BLF, sin_BLF = torch.randn(2, 2, 3, 4, generator=generator)
    try:
        found = own(q_BHLD, k_BGLD, *(torch.cat([a, a], dim=-1) for a in (cos_BLF, sin_BLF)))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
        return False
    expected = (rotate(x, cos_BLF[:, None], sin_BLF[:, None]) for x in (q_BHLD, k_BGLD))
    return isinstance(found, tuple) and all(
        isinstance(f, Tensor) and f.shape == e.shape and torch.allclose(f, e, atol=1e-5)
        for f, e in zip(found, expected, strict=False)
    )


class AttentionOfLongTexts:
    """Stands in for transformers' `sdpa_attention_forward`, and calls it for all but long plain causal attention.

    That goes to `attend`, which returns None for what it leaves to the other.
    """

    def __init__(
        self, attend: LongAttention = long_causal_attention, own: Callable[..., Any] = sdpa_attention_forward
    ) -> None:
        self._attend, self._own = attend, own

    def __call__(
        self,
        module: nn.Module,
        query_BHLD: Tensor,
        key_BHLD: Tensor,
        value_BHLD: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns [B, L, H, D] and no weights."""
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        more = any(others.get(name) is not None and others[name] is not False for name in _CHANGING)
        if attention_mask is None and not dropout and causal is True and not more:
            scale = query_BHLD.shape[-1] ** -0.5 if scaling is None else scaling
            if (output_BHLD := self._attend(query_BHLD, key_BHLD, value_BHLD, scale=scale)) is not None:
                return output_BHLD.transpose(1, 2).contiguous(), None
        others |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        attended: tuple[Tensor, Tensor | None]
        attended = self._own(module, query_BHLD, key_BHLD, value_BHLD, attention_mask, **others)
        return attended


class AttentionTable:
    """A model file's table of attention functions, but for those that others stand in for."""

    def __init__(self, table: Any, stand_in: Callable[[Any], Any]) -> None:
        self._table, self._stand_in = table, stand_in

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __getitem__(self, name: str) -> Any:
        return self._stand_in(self._table[name])

    def get_interface(self, name: str, default: Any) -> Any:
        """Returns the function of a name, or the default."""
        return self._stand_in(self._table.get_interface(name, default))


def with_attention(forward: Any, stand_in: Callable[[Any], Any]) -> Forward | None:
    """Returns a copy of an attention's forward in which others stand in for attention functions, None for others."""
    return with_name(
        forward, _TABLE, lambda table: AttentionTable(table, stand_in) if hasattr(table, "get_interface") else None
    )


def fuse_long_attention(model: nn.Module, attend: LongAttention = long_causal_attention) -> list[nn.Module]:
    """Gives attention modules the table above, and returns those modules.

    Those with a forward of their own stay as they are, unless it is one from `fuse_rotations`.
    """
    return _with_forwards(model, lambda module: _with_table(_forward_of(module), attend))


def _forward_of(module: nn.Module) -> Any:
    of_class = type(module).forward
    if (own := vars(module).get("forward")) is None:
        return of_class
    function = getattr(own, "__func__", None)
    return function if getattr(function, "__wrapped__", None) is of_class else None


@functools.cache
def _with_table(forward: Any, attend: LongAttention) -> Forward | None:
    long = AttentionOfLongTexts(attend)
    return with_attention(forward, lambda function: long if function is sdpa_attention_forward else function)
