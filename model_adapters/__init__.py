"""lm-eval's model `sb`: from the arguments of `--model_args` to the answers of requests.

A loaded model goes one way. The constructor of `lm.StickBreakingLM` takes the first three steps, and lm-eval's calls
the fourth:

1. `open` loads the model and its tokenizer -> `Opened`.
2. `prepare` replaces parts by faster ones and undoes each change that moves the logits -> `Prepared`.
3. `self_test.testing.begin` makes a `Session` of both and tests whether batches, padding and KV caches leave the logits
   as they are.
4. `score` and `generate` answer requests with the session.

No step reads anything that a later step makes. An encoder-decoder model has no session and runs as in lm-eval's `hf`.

The class and the four steps:

- `lm`: `StickBreakingLM`, the class that lm-eval creates and calls
- `open`: from the arguments to a loaded model with its tokenizer
- `prepare`: changes to a loaded model, such as fused kernels, that must not move its logits
- `self_test`: how transformers' models may be run: in batches, with padding, with a KV cache
- `session`: a prepared model with everything that a request needs, such as batch limits
- `score`: log-likelihoods of lm-eval's requests, token log-probabilities of our own tasks, and attention spans
- `generate`: from prompts to answers up to a stop sequence

Lm-eval's other models, such as `hf` and `vllm`, which return only sums of log-probabilities:

- `any_model`: the request types of our own tasks, answered by such a model
- `backend`: such a model's calls: counted, checked, and kept in the response cache

Used by several of these:

- `options`: the adapter's own arguments
- `encoding`: from texts to tokens
- `chat_templates`: chat templates, rendered with limited memory
- `truncation`: cuts or refuses prompts and contexts that are too long
- `answers`: collects answers, writes each to the response cache at once, and returns them in order
- `batching`: batches with a token budget, halved when memory runs out
- `rope`: RoPE scaling and extrapolation for one request at a time
- `record`: the model's record in the results file, and the settings that a response cache must match

Every request type is a function of a session. So everything that an answer depends on is in the function's arguments;
only limits on memory change while the model answers. Scores and texts come from generators. Inside them, batches are
queued and halved; outside, one class (`answers.Answers`) collects answers of every type. If an answer cannot be stored,
or a later pass fails, the generator first yields the results that are computed already.
"""
