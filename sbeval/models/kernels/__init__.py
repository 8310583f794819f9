"""Kernels of the models beside attention.

- `gated`: how is a gated activation computed in one pass?
- `rotary`: how are queries and keys rotated in one pass?
- `one_row`: how is one row mapped, with the norm before a map and the residual stream behind it?
- `slots`: how do new keys and values come into slots, and how do new positions attend by softmax to what they hold?
- `devices`: where do Triton's kernels run, and what if one of PyTorch is missing or fails?
"""
