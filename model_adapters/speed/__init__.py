"""What makes a loaded model faster: kernels in place of its parts, and its caches. Knows nothing of lm-eval.

- `faster`: the one entry: replaces parts, compares the model with itself before, and gives parts back if it differs
- `replacing`: how a part is replaced
- `linear`: linear maps padded to widths that a GPU reads in one piece
- `parts`: norms and gated MLPs as one kernel each
- `seen_keys`: windows, chunks and sinks without a mask of all pairs
- `scans`: Mamba-2's scan over a text in pieces
- `plan`: maps of a tensor plan whose outputs processes add up
- `spread`: layers on several GPUs, which work at once
- `attention`: rotary embeddings as one kernel, and another kernel for attention on long texts
- `generating`: a key/value cache that new tokens are written into, and attention for one of them at a time
"""
