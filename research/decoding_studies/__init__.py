"""Experiments on decoding.

- `prompt_lookup`: what drafts looked up in the prompt could gain
"""
