"""Kernels of the models beside attention.

- `gated`: how is a gated activation computed in one pass?
- `rotary`: how are queries and keys rotated in one pass?
- `devices`: where do Triton's kernels run?
- `optional`: what if a kernel of PyTorch is missing or fails?
"""
