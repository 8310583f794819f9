"""Step 4 of 4, generate: continues prompts up to a stop sequence and returns the texts of the answers.

`requests.generate_until` takes the `Session`. It calls generators, which yield (index of the prompt, tokens or text) as
soon as an answer is complete.

- `requests`: `generate_until`, which takes lm-eval's requests and returns their answers
- `answers`: turns prompts into the texts of answers; a reasoning model thinks before it answers
- `continuations`: turns prompts into generated tokens, in slots if the model and the generation settings allow it
- `slots`: greedy generation by this project's own decode loop: each text has a slot (a row) of one KV cache
- `batches`: generation in batches by transformers' `generate`
- `context_parallel`: long prompts that all ranks of a context-parallel group prefill together
- `call`: one call of transformers' `generate`
- `growing_cache`: a preallocated KV cache, and decode steps without cuDNN's attention, for transformers' `generate`
- `thinking`: the token budget and the end marker of a model's thinking, and the tokens that end it if it is too long
- `texts`: finds stop sequences in generated tokens, and decodes the text of an answer

Equal prompts with greedy decoding are answered once. Prompts do not share prefixes as windows do in `score`: the KV
caches of all contexts would have to stay in memory between calls for different request types.
"""
