"""Stick-breaking attention: one operation, several implementations that agree.

- `api`: the public functions; checks shapes and options, and chooses an implementation, also for decode steps
- `packed`: where does each sequence of a packed batch begin and end (`cu_seqlens`)?
- `context_parallel`: how do several ranks attend to one sequence?
- `zigzag`: which chunks of the sequence does each rank hold, and which does it request from other ranks?
- `span`: how many of the newest keys together hold a stated share of a query's attention weight?
- `impl`: the implementations: reference, blockwise (PyTorch) and Triton

Decisions:

- The definition of attention is an implementation. `reference` is slow and reads like the formula, `blockwise` runs in
  O(L) memory on any device, `triton` is fast. Tests compare all three, and none imports another. `impl="auto"` chooses
  by device and dtype; after that choice there is no silent fallback.
- Blocks of keys combine. With `causal=False` every key is older than every query, so the results of calls on blocks of
  keys, newest block first, combine to the result of one call on all keys. Context parallelism relies on it: a rank
  requests no older keys once newer keys have taken nearly all attention weight of its queries (their sticks are spent).
  Softmax needs all keys. With gradients, keys and values are all-gathered for both kinds of attention.
- The effective span needs no weights. The weight of the newest keys is one minus the stick that they leave for older
  keys. So they hold a certain share of all weight once a sum of softplus terms passes a bound, which follows from the
  remainder.
- The implementations are registered PyTorch operators, so torch.compile sees one node for each pass. The size of every
  tensor that is saved for the backward pass follows from the inputs' shapes.
- `hub/lay_out.py` makes the package for Hugging Face's kernels hub by copying this folder: it makes the imports
  relative and registers the operators in a namespace that ends in a hash of the source, so that a process can load two
  revisions.
"""

from sbeval.attention.api import StickBreakingOutput, stickbreaking_attention, stickbreaking_decode
from sbeval.attention.span import EffectiveSpan, effective_span

__all__ = ["EffectiveSpan", "StickBreakingOutput", "effective_span", "stickbreaking_attention", "stickbreaking_decode"]
