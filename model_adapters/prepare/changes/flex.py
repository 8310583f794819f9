"""flex_attention: on a GPU, compiled for every input shape; on a CPU, where compiling takes minutes, replaced."""

import logging
from typing import Any

import torch
import torch._dynamo.config

from sbeval.model_adapters.prepare.change import Change, Setting, Undo

logger = logging.getLogger(__name__)

_MOST_SHAPES = 2**12


def settle_flex_attention(model: Any, setting: Setting) -> Undo | None:
    """Raises torch.compile's recompile limit on a GPU; on a CPU replaces flex_attention by SDPA or eager attention.

    A flex_attention that the user chose stays. Returns the function that undoes a replacement, None without one.
    """
    before = model.config._attn_implementation
    if before != "flex_attention":
        return None
    if model.device.type != "cpu":
        # after 8 shapes, the default limit, flex_attention would run uncompiled and build a matrix of all token pairs
        limits: Any = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _MOST_SHAPES)
        limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, _MOST_SHAPES)
        return None
    if setting.attention_named or setting.in_memory:
        return None
    instead = "sdpa" if model._supports_sdpa else "eager"
    logger.warning("compiling flex_attention of config.json for a CPU takes minutes: %s is used instead", instead)
    model.set_attn_implementation(instead)
    return lambda: model.set_attn_implementation(before)


CHANGE = Change(
    name="attentions in place of flex_attention", apply=settle_flex_attention, applies_to=lambda setting: True
)
