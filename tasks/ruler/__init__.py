"""RULER's tasks: needles, variable tracking, word extraction and question answering at any context length.

- `task`: the base class: turns samples into documents, requests and scores
- `options`: the options of RULER's tasks
- `families`: the task classes; those that score the answer instead of generating it
- `texts`: loads essays, and reports texts that are missing
- `wording`: the benchmark's wording, read from lm-eval's sources
- `niah`: needles in a haystack, and variable tracking
- `words`: common-words and frequent-words extraction
- `qa`: question answering over documents
- `haystacks`: haystacks: units of text with known token counts
- `drafts`: drafts: samples whose number of haystack units is still open
- `sizes`: chooses how many units fill a prompt to its token budget

Decisions:

- The wording is RULER's, the generator is ours. Templates are read from the installed lm-eval's sources as literals, so
  a score is comparable with other scores of that wording; lm-eval's version is recorded. A sample depends only on task,
  seed and index, and a shorter haystack is the beginning of a longer one, so models and lengths are compared sample by
  sample. The length of a prompt is the sum of its pieces' token counts. One prompt in 50 is also tokenised as a whole;
  if its count differs from the sum, every prompt of its block of 50 samples is tokenised as a whole.
- NVIDIA's rule for filling prompts is an option, not the default. Their scripts leave up to a quarter of a 4K budget
  empty, by an amount that differs between lengths and samples; a reader would take that for a property of the model.
  `scripts: "nvidia"` repeats their rule for scores that are to be compared with theirs.
- A task's own minimum decides its lengths. If a sample does not fit a context length, that length is left out for the
  task, and recorded. All samples count here, whether they are run or not, because otherwise the ranks of a run could
  disagree. Corpora are searched for by task name before the model is loaded, from the same definitions that the tasks
  are made of.
"""
