"""Stick-breaking attention: one operation, several implementations that agree."""

from sbeval.attention.api import StickBreakingOutput, stickbreaking_attention
from sbeval.attention.span import EffectiveSpan, effective_span

__all__ = ["EffectiveSpan", "StickBreakingOutput", "effective_span", "stickbreaking_attention"]
