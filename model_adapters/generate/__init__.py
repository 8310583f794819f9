"""Generates text: from prompts to answers up to a stop sequence.

- `requests`: `generate_until`, from the requests to their answers
- `answers`: prompts to answers, behind any thinking; yields (index, text)
- `continuations`: prompts to generated tokens, in slots where that is possible; yields (index, tokens)
- `slots`: greedy generation of many texts side by side
- `batches`: generation in batches by transformers' own loop
- `context_parallel`: long prompts that all ranks of a group prefill together
- `call`: one call of transformers' `generate`
- `growing_cache`: a KV cache with room for new tokens, and attention without plans, for transformers' own loop
- `thinking`: the budget and the end of a model's thinking, and how a model is made to answer
- `texts`: generated tokens to the text of an answer
"""
