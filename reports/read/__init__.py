"""Reads results files and samples files of lm-eval into typed rows.

- `files`: finds result files, streams samples files, collects notes on data that is left out, watches for changes
- `fields`: checks the type of each field, and formats names and lengths
- `runs`: parses one results file into typed records
- `record_texts`: texts about facts in the record of a model
- `models`: groups runs into evaluated models and names them
- `samples`: sums by document and scores of single samples, from samples files
- `results`: the tidy table with one row for each number; the class `Reader`; all data of a report

Reports read only these files, and import neither torch nor lm-eval, so a report can be rebuilt years later. Unknown
fields of a newer version are kept, a field of the wrong type counts as missing, and the page has a note on everything
that cannot be read.

If a model was run on a task several times, the report uses the run on most samples, and of equally large ones the
newest: a short run with `--limit` must not replace a complete evaluation. `EvaluatedModel.task_runs` returns runs in
that order.

The tidy table is the data that is published and exported. Each of its columns is defined by a `results.Column`: its
name, type, the function that reads a cell, and whether the column belongs to the key of a number.
"""
