"""Log-probabilities of target tokens, the request types with which tasks ask for them, and how far attention looks.

- `requests`: the adapter's request types and their responses, and the file format of token sequences
- `scorer`: log-probabilities without [length, vocabulary] logits, and without waiting for the GPU
- `body`: the part of a model that computes hidden states, run separately from its head
- `through_cache`: log-probabilities of targets that a model reads through a replaced KV cache
- `context_parallel`: several ranks score one window
- `logprob_kernel`: log-probabilities and argmax in one pass over the logits, a Triton kernel
- `non_finite`: NaN and infinite logits: detecting them, and recording null in lm-eval's tasks
- `returned`: checks of the log-probabilities and texts that a server or an engine returns
- `guarded`: installs these checks in lm-eval's models that call a server or an engine
- `rounding`: differences between logits, and how large a difference can come from rounding
- `spans`: how far back every attention head looks

Decisions:

- A perplexity request names a token range of a corpus on disk; it does not carry the tokens. Prompts of 65,536 tokens
  would otherwise be copied into every document, sample file and cache key. The name contains the hashes of text and
  tokenizer, so a cached response cannot belong to another text.
- Log-probabilities are fp32 and summed in fp64: a half-precision sum over thousands of tokens changes a perplexity
  visibly. The head runs over chunks of positions, so memory does not grow with length times vocabulary.
"""
