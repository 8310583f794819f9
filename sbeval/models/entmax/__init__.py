"""Attention whose logits become weights by entmax-1.5, and the length-dependent scales of SSMax and ASEntmax.

- `definition`: entmax-1.5 and attention as their formulas read, for tests
- `weights`: entmax-1.5 with its gradient, from a threshold that Newton's method finds
- `attention`: causal entmax attention in blocks of queries or of windows, and of a decode step over slots
- `kernel`: adasplash's Triton kernel, if that package is installed
- `scales`: factors of the queries, which grow with the number of keys

Decisions:

- No kernel of this project: on a GPU `adasplash` computes heads without a bias, and plain PyTorch all others. PyTorch
  materialises the logits of a block of queries only, so memory does not grow with the length.
- ALiBi's heads see a window: a key whose bias alone puts its logit too far below the largest has a weight of exactly
  zero, so the keys beyond it are not computed. Heads with similar windows are computed together. Results are the
  same.
- SSMax and ASEntmax scale queries before attention, so softmax kernels, caches and padding work as for plain softmax.
"""
