"""`sbeval inspect`: describes a checkpoint, its memory needs and the cost of its evaluation, without loading weights.

- `command`: which options does `sbeval inspect` have, and how is its output printed?
- `description`: which facts follow from a checkpoint's headers, configuration and tokenizer?
- `memory`: how much memory do windows and generated texts need, and how long may they be?
- `work`: how many requests and tokens do tasks have, and how long do they take?

Only `--measure` and `--self-test`, which run the model, read tensors.

- The model is built by the code that loads it, with tensors on the meta device whose shapes and dtypes come from the
  weight files' headers; transformers models are loaded on that device too. So `inspect` reports missing or unsupported
  tensors with the messages of loading, and no second list of a format's tensors can go out of date. This takes seconds,
  mostly to import torch. What headers and `config.json` already rule out, such as sizes that the files cannot hold, is
  refused before a model is built.
- Requests and tokens are counted from the requests that the tasks really build, not estimated by formulas.
"""
