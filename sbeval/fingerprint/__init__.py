"""What a number depends on, part by part: a part that has changed makes it another number.

- `parts`: how are two fingerprints compared, in words?
- `checkpoint`: which files of a checkpoint decide what a model answers?
- `task_files`: which files define the tasks of a run, and which data do they name?
- `evaluation`: what does one lm-eval run depend on?
"""
