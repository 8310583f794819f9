"""Step 4 of 4, generate: from prompts to answers up to a stop sequence.

`requests.generate_until` takes the `Session`. The generators below yield (index, tokens) or (index, text) as soon as an
answer is complete.

- `requests`: `generate_until`, from lm-eval's requests to their answers
- `answers`: from prompts to the texts of answers, after the model's thinking if it thinks
- `continuations`: from prompts to generated tokens, in slots if model and setting allow it
- `slots`: greedy generation of many texts side by side in slots of one KV cache
- `batches`: generation in batches by transformers' own loop
- `context_parallel`: long prompts that all ranks of a group prefill together
- `call`: one call of transformers' `generate`
- `growing_cache`: a KV cache with spare room, and decode steps without cuDNN, for transformers' own loop
- `thinking`: the budget and the end marker of a model's thinking, and how a model is made to answer
- `texts`: from generated tokens to the text of an answer

Identical greedy prompts are answered once. Prefixes are not shared between prompts as they are in `score`: the KV
caches of all contexts would have to be kept from one request type to the next.
"""
