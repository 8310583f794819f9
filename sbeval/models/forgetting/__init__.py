"""Forgetting attention, and what its authors put around it.

- `decay`: how do forget gates reach the logits?
- `shift`: how do keys and values take part of the position before?
- `cached`: what does a cache hold besides, and from what does the next position go on?
- `skipping`: which keys has a text forgotten?
- `whole_text`: how is a whole text computed, without the keys it has forgotten?
"""
