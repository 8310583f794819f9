"""The sections of the report page: one file for each kind of measurement.

Each file reads the data, draws the figures and builds the section, or several sections.

- `curves`: perplexity against context length, and over the steps of one training
- `differences`: paired differences of NLL between context lengths, and between two conditions
- `caches`: what quantized and replaced KV caches cost, as paired differences to the full cache
- `positions`: NLL by position in a window
- `position_sums`: the data for `positions`: bins of positions, sums by document, paired differences with intervals
- `needed`: the share of target tokens whose NLL is low only with a long context
- `maps`: heat maps of NLL by position, by document and by checkpoint against context length
- `needles`: scores of needle tasks by depth and context length
- `claimed`: one number for each curve over context lengths; declared, training and effective lengths of each model
- `ruler`: RULER scores against context length
- `recall`: recall probes
- `spans`: attention spans, as means and for every layer and head
- `answered`: tasks whose samples are questions with answers
- `answers`: single documents and answers from the samples files
- `suite`: ordinary lm-eval tasks, side by side and by input length, and the paper's tables
- `runs`: speed and memory of each run, provenance of every number, and notes on data that was left out

To add a kind, add one file here and one line to `KINDS` in `reports.build`. The file defines a `Kind`: a function that
builds a section from `Material`, the data of the report, and optionally `Reader`s. A reader reads data that is not in
the table of measurements, and merges the data of several training seeds into that of one model. `build` passes the
readers of all kinds to `load_results`, so `reports.read` imports nothing from here. A kind that `needs` a reader gets
no section if that reader found no data.

Results that several kinds use (which lengths lower NLL, RULER scores, one number for each curve) are computed once, in
`build`, and passed in `Material`.
"""
