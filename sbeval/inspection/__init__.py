"""`sbeval inspect`: what a checkpoint is, what it needs and how long its evaluation takes, before its weights are read.

- `command`: what can be asked, and how is the answer written?
- `description`: what do a checkpoint's headers, configuration and tokenizer say of it?
- `memory`: how much memory do windows and generated texts take, and how long may they be?
- `work`: how many requests and tokens are a list of tasks, and how long do they take?

Only `--measure`, which runs the model, reads tensors.
"""
