"""Plain PyTorch in blocks: O(L) memory, any device, differentiable; what a CPU runs.

Each block of queries walks the keys newest to oldest and carries the log of the remaining stick. Keys are stored
newest first, so that the sums over newer keys are plain cumulative sums. The backward pass repeats that walk to find
the stick before each block of keys, then goes oldest to newest (paper, equation 6).

Shape suffixes: N batch times key/value heads, S rows: the query heads sharing a key/value head times the queries of a
block, Q queries, K keys, D head_dim, J keys of a block.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

QUERY_BLOCK = 128
KEY_BLOCK = 256
LARGEST_LOGIT = 80.0


def blockwise(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    scale: float,
    attend_current: bool,
    seq_start_B: Tensor | None,
    cu_seqlens: Tensor | None,
    skip_threshold: float | None,
) -> tuple[Tensor, Tensor]:
    """Returns output [B, H, Q, D] and remainder [B, H, Q]."""
    output, remainder, _ = _forward(
        q_BHQD, k_BGKD, v_BGKD, scale, attend_current, seq_start_B, cu_seqlens, skip_threshold
    )
    return output, remainder


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The inputs in blocks: rows of queries that share a key/value head, keys newest first, logits' scale applied."""

    q_NSQD: Tensor
    k_NKD: Tensor
    v_NKD: Tensor
    attend_current: bool
    seq_start_N: Tensor | None
    row_blocks: list[tuple[slice, int]]

    @classmethod
    def split(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        attend_current: bool,
        seq_start_B: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> "_Blocks":
        batch, heads, queries, head_dim = q.shape
        groups, keys = k.shape[1], k.shape[2]
        dtype = torch.promote_types(q.dtype, torch.float32)
        return cls(
            (q.to(dtype) * scale).reshape(batch * groups, heads // groups, queries, head_dim),
            k.to(dtype).reshape(batch * groups, keys, head_dim).flip(1),
            v.to(dtype).reshape(batch * groups, keys, head_dim).flip(1),
            attend_current,
            None if seq_start_B is None else seq_start_B.repeat_interleave(groups),
            _row_blocks(queries, seq_start_B, cu_seqlens),
        )

    def key_blocks(self, rows: slice, first_key: int) -> list[slice]:
        """Blocks of keys these rows may attend, newest first."""
        keys = self.k_NKD.shape[1]
        last_row = keys - self.q_NSQD.shape[2] + rows.stop - 1
        newest, oldest = keys - 1 - (last_row if self.attend_current else last_row - 1), keys - first_key
        return [slice(start, min(oldest, start + KEY_BLOCK)) for start in range(newest, oldest, KEY_BLOCK)]

    def rows(self, tensor_NSQD: Tensor, rows: slice) -> Tensor:
        return tensor_NSQD[:, :, rows].flatten(1, 2)

    def logits(self, q_NSD: Tensor, rows: slice, block: slice, active_N: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits and the log of what each key alone leaves of the stick, negated; -inf and 0 where masked."""
        keys = self.k_NKD.shape[1]
        k_NJD = self.k_NKD[:, block]
        logits_NSJ = q_NSD @ (k_NJD if active_N is None else k_NJD[active_N]).mT
        # past this a key takes the whole stick in any precision; sums of larger numbers would round it away
        logits_NSJ.clamp_(max=LARGEST_LOGIT)
        spent_NSJ = softplus(logits_NSJ, threshold=2 * LARGEST_LOGIT)
        first_row = keys - self.q_NSQD.shape[2] + rows.start
        limit = first_row if self.attend_current else first_row - 1
        newest_key = keys - 1 - block.start
        if newest_key > limit:
            key_J = newest_key - torch.arange(block.stop - block.start, device=q_NSD.device)
            limit_Q = torch.arange(limit, limit + rows.stop - rows.start, device=q_NSD.device)
            masked_SJ = (key_J[None, :] > limit_Q[:, None]).repeat(self.q_NSQD.shape[1], 1)
            logits_NSJ = logits_NSJ.masked_fill(masked_SJ, -torch.inf)
            spent_NSJ = spent_NSJ.masked_fill(masked_SJ, 0.0)
        if self.seq_start_N is not None:
            key_J = newest_key - torch.arange(block.stop - block.start, device=q_NSD.device)
            start_N = self.seq_start_N if active_N is None else self.seq_start_N[active_N]
            padding_NSJ = (key_J < start_N[:, None])[:, None, :]
            logits_NSJ = logits_NSJ.masked_fill(padding_NSJ, -torch.inf)
            spent_NSJ = spent_NSJ.masked_fill(padding_NSJ, 0.0)
        return logits_NSJ, spent_NSJ


@torch.library.custom_op("sbeval::stickbreaking_blockwise_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    attend_current: bool,
    seq_start_B: Tensor | None,
    cu_seqlens: Tensor | None,
    skip_threshold: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output, remainder, and how many blocks of keys each head and block of rows visited."""
    blocks = _Blocks.split(q, k, v, scale, attend_current, seq_start_B, cu_seqlens)
    output_NSQD = torch.empty(blocks.q_NSQD.shape, dtype=blocks.q_NSQD.dtype, device=q.device)
    log_remainder_NSQ = output_NSQD.new_empty(output_NSQD.shape[:3])
    visited_NR = q.new_zeros(len(blocks.q_NSQD), _most_row_blocks(q, cu_seqlens), dtype=torch.int32)
    for index, (rows, first_key) in enumerate(blocks.row_blocks):
        q_NSD = blocks.rows(blocks.q_NSQD, rows)
        out_NSD = torch.zeros_like(q_NSD)
        log_stick_NS = q_NSD.new_zeros(q_NSD.shape[:2])
        for block in blocks.key_blocks(rows, first_key):
            active_N = _still_active(log_stick_NS, skip_threshold)
            if active_N is not None and not len(active_N):
                break
            select = slice(None) if active_N is None else active_N
            visited_NR[select, index] += 1
            logits_NSJ, spent_NSJ = blocks.logits(q_NSD[select], rows, block, active_N)
            through_NSJ = spent_NSJ.cumsum(-1)
            weights_NSJ = logits_NSJ.sub_(through_NSJ).add_(log_stick_NS[select][..., None]).exp_()
            out_NSD[select] += weights_NSJ @ blocks.v_NKD[select, block]
            log_stick_NS[select] -= through_NSJ[..., -1]
        shape = (out_NSD.shape[0], -1, rows.stop - rows.start)
        output_NSQD[:, :, rows] = out_NSD.view(*shape, q.shape[-1])
        log_remainder_NSQ[:, :, rows] = log_stick_NS.view(shape)
    return output_NSQD.view(q.shape).to(q.dtype), log_remainder_NSQ.view(q.shape[:3]).exp(), visited_NR


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    attend_current: bool,
    seq_start_B: Tensor | None,
    cu_seqlens: Tensor | None,
    skip_threshold: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    remainder = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    visited_NR = q.new_empty((k.shape[0] * k.shape[1], _most_row_blocks(q, cu_seqlens)), dtype=torch.int32)
    return q.new_empty(q.shape), remainder, visited_NR


@torch.library.custom_op("sbeval::stickbreaking_blockwise_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_output: Tensor,
    d_remainder: Tensor,
    remainder: Tensor,
    visited_NR: Tensor,
    scale: float,
    attend_current: bool,
    seq_start_B: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = _Blocks.split(q, k, v, scale, attend_current, seq_start_B, cu_seqlens)
    d_output_NSQD = d_output.to(blocks.q_NSQD.dtype).reshape(blocks.q_NSQD.shape)
    d_spent_NSQ = (d_remainder * remainder).to(blocks.q_NSQD.dtype).reshape(blocks.q_NSQD.shape[:3])
    dq_NSQD = torch.empty(blocks.q_NSQD.shape, dtype=blocks.q_NSQD.dtype, device=q.device)
    dk_NKD, dv_NKD = (dq_NSQD.new_zeros(blocks.k_NKD.shape) for _ in range(2))
    for (rows, first_key), visits_N in zip(blocks.row_blocks, visited_NR.T.cpu(), strict=False):
        q_NSD, do_NSD = blocks.rows(blocks.q_NSQD, rows), blocks.rows(d_output_NSQD, rows)
        dq_NSD = torch.zeros_like(q_NSD)
        walk: list[tuple[slice, Tensor | None]] = []
        for index, block in enumerate(blocks.key_blocks(rows, first_key)[: int(visits_N.max())]):
            going_N = visits_N > index
            walk.append((block, None if bool(going_N.all()) else going_N.nonzero().squeeze(-1).to(q.device)))
        sticks: list[Tensor] = []
        log_stick_NS = q_NSD.new_zeros(q_NSD.shape[:2])
        for block, active_N in walk:
            select = slice(None) if active_N is None else active_N
            sticks.append(log_stick_NS[select].clone())
            log_stick_NS[select] -= blocks.logits(q_NSD[select], rows, block, active_N)[1].sum(-1)
        # what all older keys and the remainder hand to the logits of a key: starts with the remainder's own part
        older_NS = d_spent_NSQ[:, :, rows].flatten(1, 2).clone()
        for (block, active_N), stick_NS in zip(reversed(walk), reversed(sticks), strict=True):
            select = slice(None) if active_N is None else active_N
            qb_NSD, dob_NSD = q_NSD[select], do_NSD[select]
            logits_NSJ, spent_NSJ = blocks.logits(qb_NSD, rows, block, active_N)
            weights_NSJ = (logits_NSJ - spent_NSJ.cumsum(-1) + stick_NS[..., None]).exp()
            taken_NSJ = weights_NSJ * (dob_NSD @ blocks.v_NKD[select, block].mT)
            older_NSJ = taken_NSJ.flip(-1).cumsum(-1).flip(-1) + older_NS[select][..., None]
            d_logits_NSJ = taken_NSJ - logits_NSJ.sigmoid() * older_NSJ
            older_NS[select] = older_NSJ[..., 0]
            dv_NKD[select, block] += weights_NSJ.mT @ dob_NSD
            dk_NKD[select, block] += d_logits_NSJ.mT @ qb_NSD
            dq_NSD[select] += d_logits_NSJ @ blocks.k_NKD[select, block]
        dq_NSQD[:, :, rows] = dq_NSD.view(dq_NSD.shape[0], -1, rows.stop - rows.start, q.shape[-1])
    dq = dq_NSQD.mul_(scale).view(q.shape).to(q.dtype)
    dk, dv = (grad.flip(1).view(k.shape).to(k.dtype) for grad in (dk_NKD, dv_NKD))
    return dq, dk, dv


@_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_output: Tensor,
    d_remainder: Tensor,
    remainder: Tensor,
    visited_NR: Tensor,
    scale: float,
    attend_current: bool,
    seq_start_B: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, scale, attend_current, seq_start_B, cu_seqlens, _ = inputs
    ctx.save_for_backward(q, k, v, *output[1:], seq_start_B, cu_seqlens)
    ctx.settings = (scale, attend_current)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, d_output: Tensor | None, d_remainder: Tensor | None, *unused: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, remainder, visited_NR, seq_start_B, cu_seqlens = ctx.saved_tensors
    d_output = torch.zeros_like(q) if d_output is None else d_output
    d_remainder = torch.zeros_like(remainder) if d_remainder is None else d_remainder
    dq, dk, dv = _backward(
        q, k, v, d_output, d_remainder, remainder, visited_NR, *ctx.settings, seq_start_B, cu_seqlens
    )
    return dq, dk, dv, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def _row_blocks(queries: int, seq_start_B: Tensor | None, cu_seqlens: Tensor | None) -> list[tuple[slice, int]]:
    """Blocks of rows that lie within one sequence, each with the oldest key one of its rows may see."""
    if cu_seqlens is None:
        bounds, first_keys = [0, queries], [0 if seq_start_B is None else int(seq_start_B.min())]
    else:
        bounds = cu_seqlens.tolist()
        first_keys = bounds[:-1]
    return [
        (slice(first, min(stop, first + QUERY_BLOCK)), first_key)
        for start, stop, first_key in zip(bounds[:-1], bounds[1:], first_keys, strict=True)
        for first in range(start, stop, QUERY_BLOCK)
    ]


def _most_row_blocks(q: Tensor, cu_seqlens: Tensor | None) -> int:
    """At most so many blocks of rows there are: known from shapes alone."""
    return q.shape[2] // QUERY_BLOCK + (1 if cu_seqlens is None else cu_seqlens.shape[0] - 1)


def _still_active(log_stick_NS: Tensor, skip_threshold: float | None) -> Tensor | None:
    """Heads in which some row still has at least `skip_threshold` of its stick; None where all have."""
    if skip_threshold is None:
        return None
    active = (log_stick_NS.exp() >= skip_threshold).any(-1)
    return None if bool(active.all()) else active.nonzero().squeeze(-1)
