"""Triton kernels for CUDA; on a CPU they run under Triton's interpreter (TRITON_INTERPRET=1).

- `function`: the kernels as one differentiable PyTorch operator
- `forward`: the forward kernel
- `backward`: the backward kernel, with atomic additions
- `deterministic`: the backward pass with the same bits in every run
- `decode`: the decode kernels, for a few queries and many keys
- `decode_slots`: the decode kernels for a KV cache with slots, whose lengths only the device knows
- `splits`: the code that both decode kernels share (splits of the keys)
- `sticks`: the weights of a tile's keys from the remaining stick, as products
- `logarithms`: the same weights with logarithms, for the decode kernels
- `primitives`: loads, stores and key ranges that the forward and the backward kernel share
- `launch`: launch parameters
- `hardware`: properties of the device, and descriptors for its copy engine (TMA)

Decisions, measured in benchmarks/results:

- Sticks (the weight that newer keys leave for older ones) are products, not sums of logarithms (see `sticks`): one
  exponential for each key and one reciprocal for eight.
- A stick below 2^-126 ends the loop over the keys, also without `skip_threshold`: smaller weights are not normal
  numbers of fp32. So heads that look back only a few tokens cost little, and a benchmark without skipping must use
  logits so low that the stick stays close to 1.
- A program checks its sticks when it expects them to be nearly spent. A check empties the software pipeline; after a
  late check, tiles have been visited for nothing (walks.md compares ways to choose the time).
- Tiles are copied by TMA where the GPU has it. Descriptors save address registers, so four or five programs share a
  multiprocessor instead of two. Pointers are used where alignment or hardware rules TMA out, for short texts (making a
  descriptor takes the host about 15 microseconds), and in the forward pass with head_dim up to 32, whose tiles take
  less time than the barriers around the copies.
- Programs run on as many heads at once as fit in the L2 cache (kernel_tuning_h200.md).
- A few queries have kernels of their own, which split the keys over programs and join the parts without atomics
  (decode_h200.md).
- `causal=False` compiles the same kernels without the diagonal, so causal calls pay nothing for it.
"""

from sbeval.attention.impl.triton.function import triton_attention

__all__ = ["triton_attention"]
