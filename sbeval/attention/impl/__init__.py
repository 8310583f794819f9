"""Implementations of stick-breaking attention; none imports another.

- `reference`: what is the definition?
- `blockwise`: how is it computed in O(L) memory on any device?
- `tiles`: which keys does a thread visit, and in which order?
- `triton`: how is it computed fast on a GPU?
"""
