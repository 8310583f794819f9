"""From results files to typed rows: files are found, runs and samples read, and numbers laid out one a row.

- `files`: which files belong to runs?
- `fields`: what if a field is not of the kind expected?
- `runs`: what does a results file say?
- `samples`: what do samples files add up to by document?
- `sample_scores`: which score has each sample?
- `measurements`: which rows do a task's metrics become?
- `results`: the tidy table
- `settings`: which runs are one line of a figure?
- `spans`: which span has every head?
- `notes`: what was left out, and why?
"""
