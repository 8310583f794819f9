"""lm-eval's side of a task: YAML files and the classes they name.

- `base`: what do all tasks have in common?
- `packaged`: which tasks are there, of what kind, and which models can answer them?
- `asked`: what does a task's YAML say of its options and corpus, and what of a run can be refused before torch loads?
- `metadata`: what may a user choose with `--metadata`?
- `lengths`: which context lengths does a task score?
- `tokens`: which tokenizer does the model have, and how many tokens has a text?
- `draws`: how does a name alone decide what is random?
- `perplexity`: NLL of real text at each context length
- `recall`: recall probes scored by one forward pass, and attention spans
- `ruler`: RULER's tasks

`paper/` holds the groups of the paper's tables.
"""
