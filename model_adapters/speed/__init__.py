"""What makes a loaded model faster and knows nothing of lm-eval: kernels in place of its parts, and its caches.

- `faster`: which parts are replaced, and does the model still agree with itself?
- `replacing`: how does one part stand in for another?
- `linear`: linear maps of awkward widths
- `mlp`: gated MLPs
- `norm`: RMSNorms
- `rotation`: rotary embeddings
- `long_attention`: attention of long texts
- `growing_cache`: keys and values with room to grow
- `decoding`: attention while tokens are generated one by one
"""
