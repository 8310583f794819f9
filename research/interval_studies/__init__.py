"""Simulations of how often intervals cover and verdicts err, for `benchmarks/results/intervals.md`.

- `lengths_rule`: rules for naming the longest context that lowers NLL, and how often each names a length wrongly
- `coverage`: what intervals and bands over documents cover
- `resamples`: how far the ends of intervals and bands lie from those of many more resamples
- `uneven_rules`: another rule for intervals over documents of uneven sizes
- `guard`: how often `--fail-if-worse` fails models that are equally good or worse, and seeds of one recipe
- `gates`: how often the verdicts of a policy over several tasks are wrong, and how often there are any
- `plan_power`: how often runs show the differences that `sbeval plan` says they show
- `score_intervals`: intervals of scores between 0 and 1, and of their mean over tasks
"""
