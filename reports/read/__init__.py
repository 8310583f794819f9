"""Reads results files and samples files of lm-eval into typed rows.

- `files`: finds result files, streams samples files, collects notes on what is left out, watches for changes
- `fields`: checks the type of each field, and formats names and lengths
- `runs`: one results file as typed records
- `models`: groups runs into evaluated models and names them
- `samples`: sums by document and scores of single samples, from samples files
- `results`: the tidy table with one row for each number; what a reader is; all data of a report

Reports read only these files, and import neither torch nor lm-eval, so a report can be rebuilt years later. A field of
a newer version is kept, a field of the wrong type counts as missing, and what cannot be read becomes a note on the
page.

Where one model ran a task several times, the run on most samples counts, and of equal ones the newest: a quick look
with `--limit` must not replace a whole evaluation. `EvaluatedModel.task_runs` returns runs in that order.

The tidy table is the data that is published and exported. A column of it is one value, `results.Column`: its name, how
it is read, its type, and whether it is part of what identifies a number.
"""
