"""lm-eval's side of a task: YAML files and the classes they name.

- `base`: the base class of all tasks
- `packaged`: finds packaged tasks and groups in their YAML files, and checks that a model can answer a task's requests
- `user_options`: reads and checks the options of a run's tasks before torch is imported
- `metadata`: the option classes that all tasks share, and the reader of `--metadata`
- `sources`: merges the settings of a task's YAML file, of the run and of `SBEVAL_METADATA`
- `lengths`: chooses the context lengths that a task scores
- `tokens`: loads the model's tokenizer and counts tokens
- `draws`: random draws that are seeded by names
- `perplexity`: NLL of real text at each context length
- `recall`: recall probes that one forward pass scores, and attention spans
- `ruler`: RULER's tasks
- `graded`: tasks like RULER's at four levels, in three forms of answers
- `mrcr`: MRCR from OpenAI's data, by length

`paper/` holds the groups of the paper's tables.

Decisions that hold for all tasks:

- Tasks make their documents themselves. lm-eval's `ConfigurableTask` downloads a data set and formats prompts from it;
  `BaseTask` does neither. A task reads its options, plans its documents, and builds its own requests.
- One lm-eval document carries every context length: it is a block of text (or a sample) at the longest length, with
  requests for all lengths. `--limit N` therefore selects the same N documents at each length, and differences between
  lengths are paired.
- A task's class names the class of its options, which `user_options` collects. So `sbeval run --help` lists every
  option, and each is checked before a model is loaded. No options class imports torch.
"""
