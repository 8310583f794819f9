"""RULER's tasks: needles, variable tracking, word extraction and question answering at any context length.

- `task`: the base class: turns samples into documents, requests and scores
- `options`: the options of RULER's tasks
- `families`: the task classes; a model generates an answer, or the log-likelihood of the right answer is scored
- `texts`: loads essays, and reports texts that are missing
- `wording`: the benchmark's wording, read from lm-eval's sources
- `niah`: needles in a haystack, and variable tracking
- `words`: common-words and frequent-words extraction
- `qa`: question answering over documents
- `haystacks`: filler text as a sequence of units (lines or words) with known token counts
- `drafts`: samples for which the number of haystack units has not been chosen yet
- `absent`: needles that are not there, and the scores of answers to questions about them
- `cut`: samples whose text may lose its middle, so that they fit
- `sizes`: chooses how many units fill a prompt to its token budget

Decisions:

- The wording is RULER's, the generator is ours. Templates are read from the installed lm-eval's sources as literals, so
  a score is comparable with other scores of that wording; lm-eval's version is recorded. A sample depends only on task,
  seed and index, and a shorter haystack is the beginning of a longer one, so models and lengths are compared sample by
  sample. A prompt's length is the sum of its segments' token counts. One prompt in 50 is also tokenised as a whole;
  if its count differs from the sum, every prompt of its block of 50 samples is tokenised as a whole.
- NVIDIA's rule for filling prompts is an option, not the default. Their scripts leave up to a quarter of a 4K budget
  empty, by an amount that differs between lengths and samples; a reader would take that for a property of the model.
  `scripts: "nvidia"` repeats their rule for scores that are to be compared with theirs.
- If a sample of a task does not fit a context length, that length is left out for the task, and the record names it.
  This check covers all samples, also those that `--limit` or another rank leaves out, because otherwise the ranks of a
  run could choose different lengths. Corpora are loaded before the model is, so that a missing one is reported early.
"""
