"""Changes to a loaded model, one in each file. Each file ends with a `CHANGE`; `prepare.prepared` puts them in order.

- `flex`: flex_attention, compiled for every shape on a GPU and replaced by another attention on a CPU
- `kernels`: the implementation of stick-breaking attention
- `hooks`: removes accelerate's hooks except the one at the start of each block
- `scans`: Mamba-2's scan, run over chunks of a long text one after another
- `sums`: row-parallel linear layers of a tensor-parallel plan, with a faster all-reduce for small tensors
- `norms`: RMSNorms as fused kernels
- `linear`: linear layers, padded to widths that matmul kernels read quickly
- `mlps`: `activation(gate) * up` of gated MLPs as one fused kernel
- `rotations`: rotary embeddings as one fused kernel
- `long_attention`: another attention kernel for long texts
- `visible_keys`: sliding windows, attention chunks and attention sinks without an attention mask of all pairs of tokens
"""
