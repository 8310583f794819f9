"""Stick-breaking attention: one operation, several implementations that agree."""

from sbeval.attention.api import StickBreakingOutput, stickbreaking_attention

__all__ = ["StickBreakingOutput", "stickbreaking_attention"]
