"""Forgetting attention, and what its authors put around it.

- `decay`: how do forget gates reach the logits?
- `shift`: how do keys and values take part of the position before?
- `cached`: from what does a position after a cache go on?
- `skipping`: which keys has a text forgotten?
- `whole_text`: how is a whole text computed, without the keys it has forgotten?
"""
