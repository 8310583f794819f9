"""What makes a loaded model faster: kernels in place of its parts, and its caches. Knows nothing of lm-eval.

- `faster`: the one entry: replaces parts, compares the model with itself before, and gives parts back if it differs
- `replacing`: how a part is replaced, and whether two outputs agree but for rounding
- `linear`: linear maps padded to widths that a GPU reads in one piece
- `mlp`: gated MLPs whose activation is one kernel
- `norm`: RMSNorms as PyTorch's fused kernel
- `rotation`: rotary embeddings as one kernel
- `long_attention`: another kernel for attention on long texts
- `growing_cache`: a key/value cache that new tokens are written into
- `decoding`: attention for one new token at a time
"""
