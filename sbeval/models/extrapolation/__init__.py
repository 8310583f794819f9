"""Context extrapolation of RoPE models without training: methods that change positions, not weights.

- `methods`: the methods as functions of positions, and the parser of the option `extrapolation`
- `attention`: attention with the positions of a method

SelfExtend, dual chunk attention, and sinks with a window split the query-key pairs into zones, such as near and distant
pairs. Each zone rotates its queries and keys by its own positions, and a query's keys within a zone are consecutive. So
one FlexAttention kernel, which gets the first and last key of each query, serves every method and zone; the outputs of
the zones are merged by their log-sum-exps. If FlexAttention cannot be used, one softmax goes over the keys of all
zones, in blocks of rows.

The KV cache holds unrotated keys, so `generate` of transformers works; `SlotCache` holds rotated keys and does not
support these methods. In a model of transformers, the forward of every attention module is replaced. No method changes
a text that is short enough, so a model is refused if its logits for a short text differ after the replacement.
"""

from sbeval.models.extrapolation.attention import ExtrapolatedAttention
from sbeval.models.extrapolation.methods import Extrapolation, parse_extrapolation

__all__ = ["ExtrapolatedAttention", "Extrapolation", "parse_extrapolation"]
