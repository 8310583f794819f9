"""Experiments on decoding.

- `prompt_lookup`: what drafts looked up in the prompt could gain
- `rounded_caches`: KV caches of int8 and fp8, whose rounding alone changes NLL in fp64
"""
