"""The attention function of transformers' models in a decode step, registered in `ALL_ATTENTION_FUNCTIONS`.

Shape suffixes: B slots, H query heads, G key/value heads, K room for keys, D head_dim.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sbeval.model_adapters.prepare.replacing import temporary_attributes
from sbeval.models.slots import SlotCache, softmax_decode

NAME = "sbeval_slots"
_MORE = ("softcap", "position_bias", "output_attentions")
"""Keyword arguments for features that `_attend` does not compute: it is a softmax over keys and an optional sink."""
_slots: ContextVar[SlotCache] = ContextVar("_slots")


def _attend(
    module: nn.Module,
    query_BH1D: Tensor,
    key_BGKD: Tensor,
    value_BGKD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns the attention output [B, 1, H, D], and None in place of attention weights.

    Sliding windows need no mask, since a slot holds only the keys inside the window.
    """
    more = [name for name in _MORE if kwargs.get(name) is not None and kwargs[name] is not False]
    if attention_mask is not None or more or key_BGKD.shape != value_BGKD.shape:
        needs = ", ".join(more) or "a mask, or values of another size than keys"
        raise ValueError(f"its attention needs {needs}")
    scale = query_BH1D.shape[-1] ** -0.5 if scaling is None else scaling
    options: dict[str, Any] = {"scale": scale, "sink_H": kwargs.get("s_aux")}
    output_BH1D = softmax_decode(query_BH1D, key_BGKD, value_BGKD, _slots.get().length_B, **options)
    return output_BH1D.transpose(1, 2), None


@contextlib.contextmanager
def attending_to(slots: SlotCache, model: nn.Module) -> Iterator[None]:
    """Inside this context, the attention of a transformers model reads the slots; this project's models always can."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    configs = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    attention = "_attn_implementation_internal"
    changes = {id(config): (config, {attention: NAME}) for config in configs if hasattr(config, attention)}
    token = _slots.set(slots)
    try:
        with temporary_attributes([*changes.values()]):
            yield
    finally:
        _slots.reset(token)
