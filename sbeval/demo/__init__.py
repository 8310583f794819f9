"""`sbeval demo`: evaluates two small shipped checkpoints, and shows stored results of context extension.

- `evaluation`: which tasks run on the two shipped checkpoints?
- `extension`: which stored results of context extension are shown?

- The text is Python's standard library: real text, long, and on every machine. Training documents that share a span of
  50 tokens with the library of Python 3.11.7 were left out of the checkpoints' training data. Other Python versions
  differ in part; code that only they contain was not compared with the training data.
- lm-eval runs in this process and reads only the packaged tasks, since reading the names of all its tasks takes seconds
  each time.
- Context extension takes hours on a CPU, so its results were computed on a GPU and stored; the page says so.
"""
