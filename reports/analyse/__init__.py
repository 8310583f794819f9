"""Computes statistics from the rows of a report, and writes sentences on the results.

- `statistics`: confidence intervals, and simultaneous bands for paired differences
- `selection`: which models and tasks are shown, training seeds as one model, the baseline
- `protocols`: what a curve of each perplexity protocol shows, and what it does not show
- `panels`: which perplexity results are drawn in one figure
- `claims`: up to which length more context lowers NLL, and from which length it raises it
- `findings`: sentences about one model
- `one_number`: one number that sums up a curve over context lengths
- `verdicts`: the verdict at the top of the page
- `overview`: the verdicts and the table that compare all models, and warnings below the summary
- `ruler`: RULER's averages and effective context lengths
- `suite`: the table of ordinary lm-eval tasks: one row for each metric, one column for each model
- `levels`: differences between neighbouring levels of graded tasks, on the same samples
- `left_out`: samples left out or cut, since their prompts do not fit
- `paired`: differences between two models on the same samples
"""
