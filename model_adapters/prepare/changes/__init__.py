"""Changes to a loaded model, one a file: each file ends with a `CHANGE`, which `prepare.prepared` puts in order.

- `flex`: flex_attention without a matrix of all pairs
- `kernels`: which kernels compute stick-breaking attention
- `hooks`: accelerate's hooks at the start of each block alone
- `scans`: Mamba-2's scan over a text in pieces
- `sums`: row-parallel linear layers of a tensor plan, with another all-reduce for small sums
- `norms`: RMSNorms as one kernel each
- `linear`: linear layers padded to widths that a GPU reads in one piece
- `mlps`: activation and product of gated MLPs as one kernel
- `rotations`: rotary embeddings as one kernel
- `long_attention`: another kernel for attention on long texts
- `seen_keys`: sliding windows, chunks and sinks without a mask of all pairs
"""
