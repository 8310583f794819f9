"""lm-eval's side of a model: the model `sb`, from its arguments to its answers.

A loaded model goes one way: `open` -> `Opened`, `prepare` -> `Prepared`, `self_test` -> `Session`, and `score` and
`generate` answer requests with a session. No step reads what a later one has made.

The model, and what it is asked:

- `lm`: `StickBreakingLM`, the class that lm-eval makes and calls
- `open`: from arguments to a loaded model with its tokenizer
- `prepare`: changes to a loaded model, such as kernels in place of its parts, that must not move its logits
- `self_test`: in which ways a model of another project may be run, decided before its first answer
- `session`: a prepared model with what every request needs
- `score`: log-likelihoods of lm-eval's requests, windows and targets of our own tasks, and attention spans
- `generate`: prompts in, text up to a stop sequence out
- `any_model`: the same requests for lm-eval's other models that score tokens, which return sums
- `backend`: such a model: its answers are counted, checked, and kept in the response cache

What several of these use:

- `options`: the adapter's own arguments
- `encoding`: texts to tokens
- `chat_templates`: chat templates, run with limited memory
- `truncation`: what happens to prompts and contexts that are too long
- `answers`: answers kept in the response cache as they come, returned in order
- `batching`: batches by token budget, halved when memory runs out
- `rope`: RoPE's frequencies and extrapolation for each request
- `record`: the model's record in the results file, and the settings that the response cache is checked against
"""
