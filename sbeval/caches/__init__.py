"""Replaced KV caches: quantized, static, offloaded, or made by a function of the user.

- `choice`: reads the model argument `cache`, and computes the bytes of a quantized position; imports no torch
- `suited`: says which caches do not suit a model's configuration
- `build`: makes caches of transformers for a model, and refuses models that they do not suit
- `size`: counts the bytes of the tensors that a cache holds

`sbeval.scoring.through_cache` scores targets from such a cache.

Decisions:

- A quantized cache is transformers' `QuantizedCache`, so a curve shows the cache that people serve. Its first update
  returns the keys and values as they are and stores them rounded: a prompt is read in full precision. Later updates
  return the rounded ones, those of the residual in full precision, and the new ones. When the residual is full, the
  whole cache is rounded again.
- optimum-quanto rounds to 2 and 4 bits, hqq to 8: each backend with the numbers of bits that work at every length of a
  text. The record names the backend, since the two choose scales differently.
- A group lies inside the key or value of one head at one position. In groups over several positions, rounding would
  depend on where a text is cut.
"""
