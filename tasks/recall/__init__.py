"""Recall probes scored by one forward pass: MQRAR, its text form, and flip-flop; and attention spans.

- `task`: what do all probes share?
- `sequences`: what is MQRAR at the level of tokens?
- `mqrar`: MQRAR as a task, over its own vocabulary and as text
- `flipflop`: which bit was written last?
- `text`: where do a text's answers lie among its tokens?
- `span`: how far back does every head look?
"""
