"""Perplexity of real text at each context length: one protocol a file.

- `task`: the base class of all protocols
- `rolling`: every document separately, in lm-eval's rolling windows
- `stream`: blocks of the joined text: disjoint windows, sliding windows, and NLL by position
- `fixed_target`: the same targets at every context length
- `continuing`: finds finished results that a run with other context lengths continues
- `pairs`: a user's own targets, with and without their contexts
- `riffled`: the last piece of a document whose earlier pieces alternate with those of other documents
- `longppl`: selects the targets that need a long context
- `options`: the options of perplexity tasks
- `inputs`: loads the corpus, and determines the lead-in token and the model's learned positions
- `metrics`: turns log-probabilities into sums by document, and the sums into metrics

Decisions:

- The protocol is part of a task's name. "Perplexity at 16K" can mean at least four quantities that move in different
  directions. Only protocols with identical targets at every length (`IDENTICAL_TARGETS` of `results/records.py`) are
  read as evidence that a model uses context.
- The targets are part of a point's identity. `fixed_target` chooses targets that have room for a run's longest length
  before them, so a later run with one more length would score other targets; a curve through both runs would show the
  difference of texts as a difference of contexts. The record of a run therefore holds a hash of its scored tokens,
  and reports join only runs with the same hash. To choose targets independently of the lengths would mean to drop every
  document that is shorter than the longest length anybody may ask for. Instead a run can continue a finished one
  (`continuing`): it scores the finished run's targets, and refuses lengths for which these targets have no room.
- Two conditions are scored on the same targets in one run. The gain from a user's context (`pairs`), and the loss when
  other documents stand in between (`riffled`), are paired differences: each sample logs the sums of both conditions by
  document, and `gain_over_<condition>` is computed from the pairs.
- A length of `pairs` counts context tokens only; a length of every other protocol counts all inputs of a window.
- The targets of `riffled` end every context, since only there do both arrangements have the same tokens before them.
"""
