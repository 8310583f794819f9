"""Forgetting attention: the forget gates and token shifts of the Forgetting Transformer.

- `layer`: forget gates as extra channels of keys and queries, token shifts, and what a KV cache stores for them
- `whole_text`: attention over a whole text by FlexAttention, which skips forgotten blocks of keys
"""
