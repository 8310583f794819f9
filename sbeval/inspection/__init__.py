"""`sbeval inspect`: what a checkpoint is, what it needs and how long its evaluation takes, before its weights are read.

- `command`: what can be asked, and how is the answer written?
- `description`: what do a checkpoint's headers, configuration and tokenizer say of it?
- `memory`: how much memory do windows and generated texts take, and how long may they be?
- `work`: how many requests and tokens are a list of tasks, and how long do they take?

Only `--measure`, which runs the model, reads tensors.

An inspection runs the readers that loading runs, on tensors of the meta device with the shapes and dtypes in the files'
headers, and transformers' own loading on that device. So it reports what is missing or unsupported with the messages of
loading, and needs no second list of a format's tensors. That takes some seconds for importing torch; faults that the
headers and config.json show, such as sizes that the files cannot hold, are reported before any model is built. Requests
and tokens are counted in the requests that the tasks build.
"""
