"""lm-eval's model `sb`: takes the arguments of `--model_args`, loads a model and answers lm-eval's requests.

There are four steps. The constructor of `lm.StickBreakingLM` takes the first three. The fourth runs whenever lm-eval
calls a method such as `loglikelihood`:

1. `open` loads the model and its tokenizer and returns an `Opened`.
2. `prepare` replaces submodules by faster ones, undoes each change that moves the logits, and returns a `Prepared`.
3. `self_test.testing.begin` makes a `Session` of the `Opened` and the `Prepared`, and tests whether the logits are the
   same in batches, with padding and with a KV cache.
4. `score` and `generate` answer requests with the session.

No step uses a result of a later step. An encoder-decoder model has no session and runs as in lm-eval's `hf`.

The class and the four steps:

- `lm`: `StickBreakingLM`, the class that lm-eval creates and calls
- `open`: checks the arguments, and loads a model with its tokenizer
- `prepare`: changes to a loaded model, such as fused kernels, that must not move its logits
- `self_test`: tests whether a model of transformers may run in batches, with padding and with a KV cache
- `session`: a prepared model with everything that a request needs, such as batch limits
- `score`: log-likelihoods of lm-eval's requests, token log-probabilities of our own tasks, and attention spans
- `generate`: continues prompts up to a stop sequence

Lm-eval's other models, such as `hf` and `vllm`, which return only sums of log-probabilities:

- `any_model`: answers the request types of our own tasks with such a model
- `backend`: calls such a model, checks what it returns, and stores it in the response cache

Used by several of these:

- `options`: the arguments of `--model_args` that `sb` has beyond those of `hf`
- `encoding`: turns texts into tokens
- `chat_templates`: chat templates, rendered with limited memory
- `truncation`: cuts or refuses prompts and contexts that are too long
- `answers`: collects answers, writes each to the response cache at once, and returns them in order
- `batching`: batches with a token budget, which is halved when memory runs out
- `rope`: RoPE scaling and extrapolation for one request at a time
- `record`: the model's record in the results file, and the settings that a response cache must match

Each request type is answered by a function that takes a `Session`. So all that an answer depends on is in the
function's arguments. Only batch limits change between requests: when memory runs out, or when the self-test finds a
wrong batch. Generators compute scores and texts: they queue batches, and halve a batch that does not fit into memory.
The class `answers.Answers` collects their results for every request type. If an answer cannot be stored, or a forward
pass fails, the generator first yields all results that are computed, so that they are stored, too.
"""
