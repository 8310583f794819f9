"""Forgetting attention, and what its authors put around it.

- `layer`: how do forget gates reach the logits, how are keys and values shifted, and what does a cache hold for that?
- `whole_text`: how is a whole text computed, without the keys it has forgotten?
"""
