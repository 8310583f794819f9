"""FlexAttention with tuned tile sizes for the attention of transformers' models on long texts.

PyTorch's SDPA would use cuDNN, which pads heads of 32 channels to 64. On GPUs of compute capability 9.0 FlexAttention
is faster for such heads, for texts of at least `sbeval.models.softmax.LONG_TOKENS` tokens.

The forward of an attention module looks its attention function up in the global table `ALL_ATTENTION_FUNCTIONS`. Each
module gets a copy of its forward in which this name means another table, whose function uses FlexAttention for long
texts. transformers itself and other models in the same process are not changed.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sbeval.model_adapters.prepare.change import Change, Setting, Undo
from sbeval.model_adapters.prepare.replacing import Forward, with_forwards, with_name
from sbeval.models.softmax import long_causal_attention

_TABLE = "ALL_ATTENTION_FUNCTIONS"
_CHANGING = ("softcap", "position_bias", "sliding_window", "cache", "s_aux", "output_attentions")
"""Keyword arguments that may request more than plain causal attention; with one of them, `fallback` runs."""
LongAttention = Callable[..., Tensor | None]


class AttentionOfLongTexts:
    """Replaces transformers' `sdpa_attention_forward`: calls `attend` for plain causal attention on a long text.

    For any other attention, and if `attend` returns None, it calls `fallback`, the original function.
    """

    def __init__(
        self, attend: LongAttention = long_causal_attention, fallback: Callable[..., Any] = sdpa_attention_forward
    ) -> None:
        self._attend, self._fallback = attend, fallback

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
        """Returns the output [B, L, H, D] and, in place of attention weights, None."""
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        more = any(others.get(name) is not None and others[name] is not False for name in _CHANGING)
        if attention_mask is None and not dropout and causal is True and not more:
            scale = query_BHLD.shape[-1] ** -0.5 if scaling is None else scaling
            if (output_BHLD := self._attend(query_BHLD, key_BHLD, value_BHLD, scale=scale)) is not None:
                return output_BHLD.transpose(1, 2).contiguous(), None
        others |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        attended: tuple[Tensor, Tensor | None]
        attended = self._fallback(module, query_BHLD, key_BHLD, value_BHLD, attention_mask, **others)
        return attended


class AttentionTable:
    """Wraps `ALL_ATTENTION_FUNCTIONS`: passes each function that is looked up to `stand_in`, which may replace it."""

    def __init__(self, table: Any, stand_in: Callable[[Any], Any]) -> None:
        self._table, self._stand_in = table, stand_in

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __getitem__(self, name: str) -> Any:
        return self._stand_in(self._table[name])

    def get_interface(self, name: str, default: Any) -> Any:
        """Returns the attention function of this name, or `default` if there is none, after `stand_in`."""
        return self._stand_in(self._table.get_interface(name, default))


def with_attention(forward: Any, stand_in: Callable[[Any], Any]) -> Forward | None:
    """Returns a copy of an attention module's forward that passes attention functions to `stand_in`.

    Returns None for a forward that looks no attention function up.
    """
    return with_name(
        forward, _TABLE, lambda table: AttentionTable(table, stand_in) if hasattr(table, "get_interface") else None
    )


def fuse_long_attention(model: nn.Module, attend: LongAttention = long_causal_attention) -> list[nn.Module]:
    """Gives attention modules a forward that uses `attend` for long texts, and returns the changed modules.

    A module with a replaced forward stays as it is, unless `fuse_rotations` has replaced it.
    """
    return with_forwards(model, lambda module: _with_table(_forward_of(module), attend))


def _forward_of(module: nn.Module) -> Any:
    of_class = type(module).forward
    if (replaced := vars(module).get("forward")) is None:
        return of_class
    function = getattr(replaced, "__func__", None)
    return function if getattr(function, "__wrapped__", None) is of_class else None


@functools.cache
def _with_table(forward: Any, attend: LongAttention) -> Forward | None:
    long = AttentionOfLongTexts(attend)
    return with_attention(forward, lambda function: long if function is sdpa_attention_forward else function)


def _apply(model: nn.Module, setting: Setting) -> Undo | None:
    before = {module: vars(module).get("forward") for module in model.modules()}
    if not (changed := fuse_long_attention(model)):
        return None

    def undo() -> None:
        for module in changed:
            if (forward := before[module]) is None:
                del module.forward
            else:
                module.forward = forward  # restores the copy that `fuse_rotations` has made

    return undo


CHANGE = Change(
    name="kernels for long attention", apply=_apply, applies_to=lambda setting: setting.replaces_modules, judged=True
)
