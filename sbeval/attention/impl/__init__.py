"""Implementations of stick-breaking attention; none imports another.

- `reference`: the definition, in O(L^2) memory
- `blockwise`: plain PyTorch in O(L) memory on any device
- `tiles`: the blocks of rows and tiles of keys that `blockwise` visits, and its threads on a CPU
- `triton`: kernels for GPUs
"""
