"""One file for each kind of measurement or section of the page: it reads data, draws figures and builds its section.

- `curves`: perplexity against context length, and over the steps of one training
- `differences`: paired differences of NLL between context lengths, and between two conditions
- `positions`: NLL by position in a window
- `position_sums`: the data behind `positions`: bins of positions, sums by document, paired bands
- `needed`: how much context targets need
- `maps`: heat maps of NLL by position, by document and by checkpoint against context length
- `needles`: scores of needle tasks by depth and context length
- `claimed`: one number for each curve; declared, training and effective lengths of each model
- `ruler`: RULER scores against context length
- `recall`: recall probes
- `spans`: attention spans, as means and for every layer and head
- `answers`: single documents and answers from the samples files
- `suite`: ordinary lm-eval tasks, side by side and by input length, and the paper's tables
- `runs`: cost of each run, provenance of every number, and notes on what was left out

A new kind is one new file here and one line in `KINDS` of `reports.build`. The file defines a `Kind`: a function that
builds a section from `Material`, and optionally readers. A reader brings data that is not in the tidy table, and says
how several training seeds become one. `build` passes the readers of all kinds to `load_results`, so that `reports.read`
knows no kind. A kind that `needs` a reader gets no section where that reader brought nothing.

What several kinds need (claims, RULER scores, one number for each curve) is computed once, in `build`, and handed over
in `Material`.
"""
