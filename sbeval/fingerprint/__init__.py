"""What a number depends on, part by part: a part that has changed makes it another number.

- `parts`: how are two fingerprints compared, in words?
- `checkpoint`: which files of a checkpoint decide what a model answers, and which hash have its weights?
- `tasks`: which files and local data can the tasks of a run read?
- `evaluation`: what does one lm-eval run depend on, settings, checkpoints and tasks?
"""
