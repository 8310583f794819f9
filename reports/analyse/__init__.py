"""Statistics over the rows of a report, and the sentences that they support.

- `statistics`: confidence intervals, and simultaneous bands for paired differences
- `selection`: which models and tasks are shown, training seeds as one model, the baseline
- `protocols`: which sentences the numbers of a perplexity protocol support
- `panels`: which perplexity numbers share an axis
- `claims`: up to which length more context lowers NLL, and from which length it raises it
- `findings`: sentences about one model
- `one_number`: one number for a whole curve
- `overview`: sentences that compare all models, and remarks below the summary
- `ruler`: RULER's averages and effective context lengths
- `suite`: rows of ordinary lm-eval tasks for all models
- `paired`: differences between two models on the same samples
"""
