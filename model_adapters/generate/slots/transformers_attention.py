"""Attention of transformers' models in a decode step, registered under a name that models look attention up by.

Shape suffixes: B slots, H query heads, G key/value heads, K room for keys, D head_dim.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sbeval.model_adapters.prepare.replacing import held
from sbeval.models.slots import SlotCache, softmax_decode

NAME = "sbeval_slots"
_MORE = ("softcap", "position_bias", "output_attentions")
"""Keyword arguments that request more than a softmax over keys and a sink."""
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
    """Returns [B, 1, H, D] and no weights. Sliding windows need no mask, since slots hold only the keys they see."""
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
    """Makes attention of a transformers model read the slots until the block ends. Our own models do so anyway."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    configs = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    attention = "_attn_implementation_internal"
    changes = {id(config): (config, {attention: NAME}) for config in configs if hasattr(config, attention)}
    token = _slots.set(slots)
    try:
        with held([*changes.values()]):
            yield
    finally:
        _slots.reset(token)
