"""Perplexity of real text at each context length: one protocol a file.

- `task`: the base class of all protocols
- `rolling`: every document separately, in lm-eval's rolling windows
- `stream`: blocks of the joined text: disjoint windows, sliding windows, and NLL by position
- `fixed_target`: the same targets at every context length
- `continuing`: finds finished results that a run with other context lengths continues
- `pairs`: a user's own targets, with and without their contexts
- `riffled`: scores the last piece of a document after context in which its pieces alternate with other documents'
- `longppl`: selects the targets that need a long context
- `options`: the options of perplexity tasks
- `inputs`: loads the corpus, and finds the token fed before the first target and the model's learned positions
- `metrics`: turns log-probabilities into sums by document, and the sums into metrics

Decisions:

- The protocol is part of a task's name. "Perplexity at 16K" can mean at least four quantities that move in different
  directions. Only protocols with identical targets at every length (`IDENTICAL_TARGETS` of `results/records.py`) are
  read as evidence that a model uses context.
- NLLs of two runs are comparable only if both runs scored the same targets. `fixed_target` chooses targets that have at
  least as many tokens before them as a run's longest context length, so a later run with a longer length would score
  other targets. A curve through both runs would then show a difference of texts as if it were one of contexts. The
  record of a run therefore holds a hash of its scored tokens, and reports join only runs with the same hash. Targets
  that do not depend on the lengths would be possible only without every document that is shorter than the longest
  length anybody may request. Instead a run can continue a finished one (`continuing`): it scores the finished run's
  targets, and refuses lengths that exceed the number of tokens before these targets.
- Protocols that compare two contexts score the same targets after both of them in one run. `pairs` measures by how much
  a user's context lowers the NLL, and `riffled` how much of that is lost when other documents stand in between. Both
  are paired differences: each sample logs the NLL sums with either context by document, and the metric
  `gain_over_<condition>` is computed from these pairs.
- A length of `pairs` counts context tokens only; a length of every other protocol counts all inputs of a window.
- The targets of `riffled` are the last tokens of every window: only there are the tokens before the targets the same
  in both arrangements.
"""
