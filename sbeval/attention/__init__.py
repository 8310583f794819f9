"""Stick-breaking attention: one operation, several implementations that agree.

- `api`: which shapes and options are allowed, and which implementation runs, for texts that grow in slots too?
- `packed`: where do the texts of a packed row begin and end?
- `context_parallel`: how do several processes attend to one sequence?
- `zigzag`: which of its tokens does each process hold, and which does it ask for?
- `span`: how many keys hold a given share of a query's weight?
- `impl`: the implementations
"""

from sbeval.attention.api import StickBreakingOutput, stickbreaking_attention, stickbreaking_decode
from sbeval.attention.span import EffectiveSpan, effective_span

__all__ = ["EffectiveSpan", "StickBreakingOutput", "effective_span", "stickbreaking_attention", "stickbreaking_decode"]
