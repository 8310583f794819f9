"""One pass over logits on a GPU: the log-probability of each row's target, and whether it is the most probable token.

PyTorch's log-sum-exp and argmax read half-precision logits several times and write them once in fp32; this reads them
once and writes nothing but the results.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _kernel(logits, target, logprob, greedy, vocabulary, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    wanted = tl.load(target + row)
    # what lies beyond a row is another row's: a token the model does not know has no log-probability
    known = (wanted >= 0) & (wanted < vocabulary)
    chosen = tl.load(logits + wanted, mask=known, other=float("nan")).to(tl.float32)
    # every lane keeps its own maximum and sum; they meet once, after the loop
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    before = tl.full([BLOCK], -float("inf"), tl.float32)
    spoilt = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < vocabulary, other=-float("inf")).to(tl.float32)
        spoilt += (value != value).to(tl.int32)
        raised = tl.maximum(highest, value)
        base = tl.where(raised == -float("inf"), 0.0, raised)
        total = total * tl.exp(highest - base) + tl.exp(value - base)
        highest = raised
        before = tl.maximum(before, tl.where(column < wanted, value, -float("inf")))
    top = tl.max(highest, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    result = chosen - (base + tl.log(tl.sum(total * tl.exp(highest - base), 0)))
    result = tl.where(tl.sum(spoilt, 0) > 0, float("nan"), result)
    tl.store(logprob + row, result)
    # of equal logits the first one is the most probable token, as argmax has it
    tl.store(greedy + row, (chosen == top) & (tl.max(before, 0) < top))


def kernel_target_logprobs(logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns float32 [N] log-probabilities of the targets and bool [N] whether each is the most probable token.

    Args:
        logits_NV: [N, V] in fp16, bf16 or fp32; rows may lie apart, their values may not.
        target_N: int64 [N].
    """
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    rows, vocabulary = logits_NV.shape
    logprob_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    greedy_N = torch.empty(rows, dtype=torch.bool, device=logits_NV.device)
    place = torch.cuda.device(logits_NV.device) if logits_NV.is_cuda else contextlib.nullcontext()
    with place:
        _kernel[(rows,)](
            logits_NV, target_N, logprob_N, greedy_N, vocabulary, logits_NV.stride(0), BLOCK=_BLOCK, num_warps=8
        )
    return logprob_N, greedy_N
