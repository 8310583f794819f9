"""Triton kernels of the models, other than stick-breaking attention.

- `gated`: fused gated activation
- `rotary`: fused rotary embedding
- `one_row`: linear layers for a batch of one token, fused with norm, activation, residual and rotary embedding
- `slots`: writing keys and values into slots of the KV cache, and softmax attention of a decode step over slots
- `devices`: on which devices Triton kernels run, and PyTorch kernels with a fallback
"""
