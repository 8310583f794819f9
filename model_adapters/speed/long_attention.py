"""Attention of transformers' models on long texts, where another kernel than PyTorch's own choice is faster.

A model's attention looks up its kernel by name in `ALL_ATTENTION_FUNCTIONS`. A module gets a copy of its forward in
which that table has another entry for PyTorch's attention; transformers and other models keep theirs.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sbeval.model_adapters.speed.replacing import Forward, with_name
from sbeval.models.flex import has_tuned_size, long_causal_attention

_NAME = "ALL_ATTENTION_FUNCTIONS"
_CHANGING = ("softcap", "position_bias", "sliding_window", "cache", "s_aux", "output_attentions")
"""Keywords that ask for more than plain attention, or might."""
LongAttention = Callable[..., Tensor | None]


class AttentionOfLongTexts:
    """Stands in for transformers' `sdpa_attention_forward`, and calls it for all but long plain causal attention.

    Args:
        attend: takes queries, keys, values and a scale, and returns None for what it leaves to the other.
        own: that function.
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
            output_BHLD = self._attend(query_BHLD, key_BHLD, value_BHLD, scale=scale)
            if output_BHLD is not None:
                return output_BHLD.transpose(1, 2).contiguous(), None
        found: tuple[Tensor, Tensor | None] = self._own(
            module,
            query_BHLD,
            key_BHLD,
            value_BHLD,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **others,
        )
        return found


class AttentionTable:
    """A model file's table of attention functions, but for the entry of PyTorch's attention.

    Args:
        own: that table.
        attend: as `AttentionOfLongTexts` takes it.
    """

    def __init__(self, own: Any, attend: LongAttention) -> None:
        self._own = own
        self._long = AttentionOfLongTexts(attend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __getitem__(self, name: str) -> Any:
        return self._in_place_of(self._own[name])

    def get_interface(self, name: str, default: Any) -> Any:
        """Returns the function of a name, or the default."""
        return self._in_place_of(self._own.get_interface(name, default))

    def _in_place_of(self, function: Any) -> Any:
        return self._long if function is sdpa_attention_forward else function


def fuse_long_attention(model: nn.Module, attend: LongAttention = long_causal_attention) -> list[nn.Module]:
    """Gives attention modules whose heads are small enough the table above, and returns those modules.

    Those with a forward of their own stay as they are, unless it is one from `fuse_rotations`.

    Args:
        model: a model of transformers' classes.
        attend: as `AttentionOfLongTexts` takes it.
    """
    changed = []
    for module in model.modules():
        head_dim = getattr(module, "head_dim", None)
        if not isinstance(head_dim, int) or not has_tuned_size(head_dim):
            continue
        copied = _copied(_forward_of(module), attend)
        if copied is not None:
            module.forward = types.MethodType(copied, module)
            changed.append(module)
    return changed


def _forward_of(module: nn.Module) -> Any:
    of_class = type(module).forward
    own = vars(module).get("forward")
    if own is None:
        return of_class
    function = getattr(own, "__func__", None)
    return function if getattr(function, "__wrapped__", None) is of_class else None


@functools.cache
def _copied(forward: Any, attend: LongAttention) -> Forward | None:
    def stand_in(own: Any) -> AttentionTable | None:
        return AttentionTable(own, attend) if hasattr(own, "get_interface") else None

    return with_name(forward, _NAME, stand_in)
