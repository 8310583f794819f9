"""Triton kernel: log-probability of each row's target, and whether it is the most probable token, in one pass.

PyTorch's log-sum-exp and argmax read half-precision logits several times and write an fp32 copy. This kernel reads them
once and writes only the results.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

import torch
import triton
import triton.language as tl
from torch import Tensor

from sbeval.attention.impl.triton.hardware import on_device_of

_BLOCK = 4096
_LOAD_BYTES = 16


@triton.jit
def _columns(first, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """Returns a block's columns as [LANES, WIDTH]. The WIDTH columns of a lane are adjacent: one thread loads them."""
    return first + WIDTH * tl.arange(0, LANES)[:, None] + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _add_blocks(logits, first, stop, vocabulary, highest, total, LANES: tl.constexpr, WIDTH: tl.constexpr):
    # every lane has a running maximum and sum, rescaled once for all its columns of a block
    for begin in range(first, stop, LANES * WIDTH):
        column = _columns(begin, LANES, WIDTH)
        value = tl.load(logits + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
        raised = tl.maximum(highest, tl.max(value, 1))
        base = tl.where(raised == -float("inf"), 0.0, raised)
        total = total * tl.exp(highest - base) + tl.sum(tl.exp(value - base[:, None]), 1)
        highest = raised
    return highest, total


@triton.jit
def _kernel(logits, target, logprob, greedy, vocabulary, row_stride, LANES: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    target_id = tl.load(target + row)
    # a target outside the vocabulary would read another row's logits: its log-probability is NaN
    in_vocabulary = (target_id >= 0) & (target_id < vocabulary)
    chosen = tl.load(logits + target_id, mask=in_vocabulary, other=float("nan")).to(tl.float32)
    # first the blocks before the target's, since the maximum before the target decides ties; then the rest
    target_block = tl.where(in_vocabulary, target_id, 0).to(tl.int32) // (LANES * WIDTH) * (LANES * WIDTH)
    highest = tl.full([LANES], -float("inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    before, total = _add_blocks(logits, 0, target_block, vocabulary, highest, total, LANES, WIDTH)
    highest, total = _add_blocks(logits, target_block, vocabulary, vocabulary, before, total, LANES, WIDTH)
    column = _columns(target_block, LANES, WIDTH)
    value = tl.load(logits + column, mask=(column < target_id) & in_vocabulary, other=-float("inf")).to(tl.float32)
    before = tl.maximum(before, tl.max(value, 1))
    # lanes are combined once, at the end; NaN or infinite logits have made a sum NaN
    top = tl.max(highest, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    tl.store(logprob + row, chosen - (base + tl.log(tl.sum(total * tl.exp(highest - base), 0))))
    # of equal logits the first counts as the most probable token, as in argmax
    tl.store(greedy + row, (chosen == top) & (tl.max(before, 0) < top))


def kernel_target_logprobs(logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 [N] log-probabilities of the targets and bool [N] whether each is the most probable token.

    Logits are fp16, bf16 or fp32. Rows may have any stride; logits whose last dimension is not contiguous are copied.
    """
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    rows, vocabulary = logits_NV.shape
    logprob_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    greedy_N = torch.empty(rows, dtype=torch.bool, device=logits_NV.device)
    # unaligned rows cannot be read with wide loads; lanes of several columns would then be spread over threads
    aligned = logits_NV.stride(0) % 16 == 0 and logits_NV.data_ptr() % _LOAD_BYTES == 0
    width = _LOAD_BYTES // logits_NV.element_size() if aligned else 1
    with on_device_of(logits_NV):
        arguments = (logits_NV, target_N, logprob_N, greedy_N, vocabulary, logits_NV.stride(0))
        _kernel[(rows,)](*arguments, LANES=_BLOCK // width, WIDTH=width, num_warps=8)
    return logprob_N, greedy_N
