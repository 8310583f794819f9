"""`sbeval inspect`: what a checkpoint is, what it needs and how long its evaluation takes, before its weights are read.

- `options`: which options has the command?
- `command`: what does it do, one step after another?
- `weightless`: how is a checkpoint put together from its headers alone?
- `description`: what is said of it?
- `sizes`: which sizes has its model?
- `memory`: how much memory do windows and generated texts take, and how long may they be?
- `work`: how many requests and tokens are a list of tasks?
- `duration`: how long do they take, by what was measured?
- `text`: how is all that written for a reader?

Only `--measure`, which runs the model, reads tensors.
"""
