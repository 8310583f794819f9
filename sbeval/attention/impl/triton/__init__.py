"""Triton kernels for CUDA; on a CPU they run under Triton's interpreter (TRITON_INTERPRET=1).

- `function`: how does PyTorch see the kernels as one differentiable operator?
- `forward`: how is the output computed?
- `backward`: how are the gradients computed?
- `deterministic`: how are they computed with the same bits in every run?
- `decode`: how do a few queries read many keys?
- `decode_slots`: how does one query a text, where the device alone knows how many?
- `splits`: what do the two decode kernels share?
- `sticks`: how do the keys of a tile share what is left of a stick?
- `logarithms`: the same with sticks as logarithms, for `decode`
- `primitives`: what do the forward and the backward kernel share?
- `launch`: with which parameters is a kernel launched?
- `hardware`: what does a device offer?
"""

from sbeval.attention.impl.triton.function import triton_attention

__all__ = ["triton_attention"]
