"""Kinds for tasks whose samples are questions with answers.

- `absent`: needles that are there and needles that are not
- `levels`: graded tasks by level, and whether the order of levels is measured
- `mrcr`: MRCR's scores by number of needles and length
- `fitting`: samples that were left out or cut, since their prompts do not fit
- `tallies`: counts of labels, and the most frequent label
- `panels`: figures and tables of tasks with several metrics
"""
