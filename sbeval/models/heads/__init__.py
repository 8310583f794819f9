"""What is done to heads beside attention.

- `norms`: how are queries, keys and outputs of heads normed?
"""
