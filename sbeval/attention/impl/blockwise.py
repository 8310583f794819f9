"""Stick-breaking attention in plain PyTorch, block by block: O(L) memory, any device, differentiable. CPUs run this.

Each block of rows visits the keys newest to oldest and carries the log of the remaining stick, the weight that is left
for older keys. The backward pass visits them once more in this order to compute the stick before each tile of keys,
then goes oldest to newest (paper, equation 6).

On a CPU each thread computes whole blocks of rows. Gradients of keys and values are accumulated in several buffers
(lanes): blocks that may run at the same time have different lanes, and the lanes are summed in a fixed order. So the
bits of the gradients depend on the number of threads, but not on which thread was faster.

Shape suffixes: n a range of batch times key/value heads, R rows of a block, J keys of a tile, D head_dim; the others as
in `tiles`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from sbeval.attention.impl.tiles import RowBlock, Tiles, in_threads, log_of_least_stick, most_row_blocks, spent


def blockwise(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Returns output [B, H, Q, D] and remainder [B, H, Q]; the arguments are those of `_forward`."""
    output, remainder, _ = _forward(*inputs)
    return output, remainder


@torch.library.custom_op("sbeval::stickbreaking_blockwise_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, attend_current: bool, seq_start_B: Tensor | None,
    cu_seqlens: Tensor | None, skip_threshold: float | None, cu_seqlens_k: Tensor | None = None,
    newer_remainder_BHQ: Tensor | None = None, causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns output, remainder, and how many key tiles each head and block of queries visited, int32 [N, X]."""
    tiles = Tiles.of(q, k, scale, attend_current, seq_start_B, cu_seqlens, cu_seqlens_k, causal)
    v_NKD = tiles.like_keys(v)
    output_NSQD = v_NKD.new_empty(tiles.q_NSQD.shape)
    remainder_NSQ = v_NKD.new_empty(tiles.q_NSQD.shape[:3])
    visited_NX = v_NKD.new_zeros((v_NKD.shape[0], most_row_blocks(q, k, cu_seqlens)), dtype=torch.int32)
    least = log_of_least_stick(skip_threshold, tiles.q_NSQD)
    log_newer_NSQ = None
    if newer_remainder_BHQ is not None:
        log_newer_NSQ = newer_remainder_BHQ.double().log().view(tiles.q_NSQD.shape[:3])

    def work(block: RowBlock) -> None:
        q_nRD = tiles.rows(tiles.q_NSQD, block)
        out_nRD = torch.zeros_like(q_nRD)
        log_stick_nR = q_nRD.new_zeros(q_nRD.shape[:2], dtype=torch.float64)
        least_nR = log_stick_nR.new_full((), -math.inf if least is None else least)
        if log_newer_NSQ is not None:
            least_nR = least_nR - tiles.rows(log_newer_NSQ, block)
        visits = 0
        for tile in tiles.key_tiles(block):
            if least is not None and not (log_stick_nR >= least_nR).any():
                break
            logits_nRJ = tiles.logits(q_nRD, block, tile)
            through_nRJ = spent(logits_nRJ).cumsum_(-1)
            # weights relative to the stick that reaches this tile
            weights_nRJ = logits_nRJ.sub_(through_nRJ).exp_()
            stick_nR1 = log_stick_nR[..., None].exp().to(q_nRD.dtype)
            out_nRD.addcmul_(weights_nRJ @ v_NKD[block.heads, tile], stick_nR1)
            log_stick_nR -= through_nRJ[..., -1]
            visits += 1
        tiles.put(output_NSQD, block, out_nRD)
        tiles.put(remainder_NSQ, block, log_stick_nR.exp())
        visited_NX[block.heads, block.index] = visits

    in_threads(work, tiles.row_blocks, q.device)
    return output_NSQD.view(q.shape).to(q.dtype), remainder_NSQ.view(q.shape[:3]), visited_NX


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, scale: float, attend_current: bool, seq_start_B: Any, cu_seqlens: Any, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    remainder = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    visited_NX = q.new_empty((k.shape[0] * k.shape[1], most_row_blocks(q, k, cu_seqlens)), dtype=torch.int32)
    return q.new_empty(q.shape), remainder, visited_NX


@torch.library.custom_op("sbeval::stickbreaking_blockwise_backward", mutates_args=())
def _backward(
    q: Tensor, k: Tensor, v: Tensor, d_output: Tensor, d_remainder: Tensor, remainder: Tensor, visited_NX: Tensor,
    scale: float, attend_current: bool, seq_start_B: Tensor | None, cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None = None, causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tiles = Tiles.of(q, k, scale, attend_current, seq_start_B, cu_seqlens, cu_seqlens_k, causal)
    v_NKD = tiles.like_keys(v)
    d_output_NSQD = d_output.to(v_NKD.dtype).reshape(tiles.q_NSQD.shape)
    d_spent_NSQ = (d_remainder * remainder).to(v_NKD.dtype).reshape(tiles.q_NSQD.shape[:3])
    dq_NSQD = v_NKD.new_empty(tiles.q_NSQD.shape)
    visits = visited_NX.tolist()
    # blocks of rows that run at the same time accumulate into different lanes
    threads = torch.get_num_threads() if q.device.type == "cpu" else 1
    lanes = -(-threads // max(1, len({block.heads.start for block in tiles.row_blocks})))
    dk_LNKD, dv_LNKD = (v_NKD.new_zeros((lanes, *v_NKD.shape)) for _ in range(2))
    shares: dict[tuple[int, int], list[RowBlock]] = {}
    for block in tiles.row_blocks:
        shares.setdefault((block.heads.start, block.index % lanes), []).append(block)

    def work(share: list[RowBlock]) -> None:
        for block in share:
            dk_NKD, dv_NKD = dk_LNKD[block.index % lanes], dv_LNKD[block.index % lanes]
            q_nRD, do_nRD = tiles.rows(tiles.q_NSQD, block), tiles.rows(d_output_NSQD, block)
            walk = tiles.key_tiles(block)[: visits[block.heads.start][block.index]]
            log_stick_nR = q_nRD.new_zeros(q_nRD.shape[:2], dtype=torch.float64)
            sticks: list[Tensor] = []
            for tile in walk:
                sticks.append(log_stick_nR[..., None].exp().to(q_nRD.dtype))
                log_stick_nR -= spent(tiles.logits(q_nRD, block, tile)).sum(-1)
            dq_nRD = torch.zeros_like(q_nRD)
            # the gradient that older keys and the remainder contribute to a key's logit; it starts with that of the
            # remainder
            older_nR1 = tiles.rows(d_spent_NSQ, block)[..., None]
            for tile, stick_nR1 in zip(reversed(walk), reversed(sticks), strict=True):
                logits_nRJ = tiles.logits(q_nRD, block, tile)
                took_nRJ = logits_nRJ.sigmoid()
                weights_nRJ = logits_nRJ.sub_(spent(logits_nRJ).cumsum_(-1)).exp_().mul_(stick_nR1)
                taken_nRJ = (do_nRD @ v_NKD[block.heads, tile].mT).mul_(weights_nRJ)
                dv_NKD[block.heads, tile] += weights_nRJ.mT @ do_nRD
                # summed from the oldest key: the difference of two larger sums could cancel
                older_nRJ = taken_nRJ.flip(-1).cumsum_(-1).flip(-1).add_(older_nR1)
                older_nR1 = older_nRJ[..., :1].clone()
                d_logits_nRJ = taken_nRJ.sub_(took_nRJ.mul_(older_nRJ))
                dk_NKD[block.heads, tile] += d_logits_nRJ.mT @ q_nRD
                dq_nRD += d_logits_nRJ @ tiles.k_NKD[block.heads, tile]
            tiles.put(dq_NSQD, block, dq_nRD)

    in_threads(work, list(shares.values()), q.device)
    dq = dq_NSQD.mul_(scale).view(q.shape).to(q.dtype)
    dk, dv = (grad.sum(0).flip(1).view(k.shape).to(k.dtype) for grad in (dk_LNKD, dv_LNKD))
    return dq, dk, dv


@_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, scale, attend_current, seq_start_B, cu_seqlens, _, cu_seqlens_k, _, causal = inputs
    ctx.save_for_backward(q, k, v, *output[1:], seq_start_B, cu_seqlens, cu_seqlens_k)
    ctx.settings = (scale, attend_current, causal)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_output: Tensor | None, d_remainder: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, remainder, visited_NX, seq_start_B, cu_seqlens, cu_seqlens_k = ctx.saved_tensors
    d_output = torch.zeros_like(q) if d_output is None else d_output
    d_remainder = torch.zeros_like(remainder) if d_remainder is None else d_remainder
    scale, attend_current, causal = ctx.settings
    inputs = (q, k, v, d_output, d_remainder, remainder, visited_NX, scale, attend_current)
    return *_backward(*inputs, seq_start_B, cu_seqlens, cu_seqlens_k, causal), *[None] * 8


_forward.register_autograd(_gradients, setup_context=_save_for_backward)
