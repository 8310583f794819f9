"""Ways to read beyond the training length that change where RoPE's queries and keys are, and no weights.

- `methods`: which position has each query and key, for every method, and how is one asked for?
- `attention`: how is the attention of those positions computed?
"""

from sbeval.models.extrapolation.attention import ExtrapolatedAttention
from sbeval.models.extrapolation.methods import Extrapolation, parse_extrapolation

__all__ = ["ExtrapolatedAttention", "Extrapolation", "parse_extrapolation"]
