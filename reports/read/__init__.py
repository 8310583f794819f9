"""From results files to typed rows.

- `files`: which files belong to runs, what do samples files hold, what was left out, and why, and when do they change?
- `fields`: what if a field is not of the kind expected?
- `runs`: what does one results file say?
- `models`: which runs are of one model under test?
- `samples`: sums by document, and scores of single samples
- `results`: the tidy table, one row a number; what a reader is, and all that readers bring together
"""
