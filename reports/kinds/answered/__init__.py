"""Kinds for tasks whose samples are questions with answers.

- `fitting`: samples that were left out or cut, since their prompts do not fit
"""
