"""One sequence over the processes of a group, each of which holds a part of its tokens.

For N processes a sequence is 2 N chunks of equal length. Process r holds chunks r and 2 N - 1 - r, its older and its
newer one, so all have equally many pairs of a query and a key. Only attention needs tokens of other processes.

Stick-breaking attention takes keys newest to oldest, so chunks come in that order, in growing pieces, each while the
one before is computed. A process whose sticks are all below the threshold asks for no older piece. With gradients, and
for softmax attention, the keys and values of the whole sequence are gathered first.

Shape suffixes: B batch, H query heads, G key/value heads, Q positions of this process, C those of a chunk, T all
positions, D head_dim.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sbeval.attention.api import StickBreakingOutput, stickbreaking_attention
from sbeval.attention.zigzag import Piece, chunks_of, pieces


@dataclasses.dataclass(kw_only=True, slots=True)
class Transfers:
    """What this process has received of keys and values from others, and what it would have without skipping."""

    received_bytes: int = 0
    whole_bytes: int = 0


class ContextParallel:
    """The processes of a `group` that share sequences; None means all processes."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.ranks = dist.get_world_size(self.group)
        self.transfers = Transfers()
        self.active = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside it, models that have this object take their inputs as this process's part of a sequence."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def padded_tokens(self, tokens: int) -> int:
        """Length of a sequence padded at its end to equal chunks; no earlier token sees the padding."""
        return -(-tokens // (2 * self.ranks)) * 2 * self.ranks

    def positions(self, tokens: int) -> Tensor:
        """Returns int64 [Q]: which positions of a sequence this process holds, after padding."""
        chunk = tokens // (2 * self.ranks)
        return torch.cat([torch.arange(start, start + chunk) for start in self._starts(chunk)])

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over the processes, in place; all must call it."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather_objects(self, item: Any) -> list[Any]:
        """Returns the item of each process, by rank; all must call it."""
        items: list[Any] = [None] * self.ranks
        dist.all_gather_object(items, item, group=self.group)
        return items

    def from_rank(self, rank: int, item: Any) -> Any:
        """Returns the item of that rank's process, ignoring those of the others; all must call it."""
        items = [item]
        dist.broadcast_object_list(items, group=self.group, group_src=rank)
        return items[0]

    def gather(self, own: Tensor, rank: int) -> Tensor | None:
        """Returns [B, G, T, D] from all `own` [B, G, Q, D] to that rank's process, None to others; all must call it."""
        parts = self._room_for_parts(own) if rank == self.rank else None
        dist.gather(own.contiguous(), parts, group=self.group, group_dst=rank)
        return None if parts is None else _in_order(parts)

    def stickbreaking_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, skip_threshold: float | None = None, **options: Any
    ) -> StickBreakingOutput:
        """Like `sbeval.stickbreaking_attention`, for this process's part of a sequence; all must call it.

        q is [B, H, Q, D], k and v are [B, G, Q, D] of the same positions; `options` are `scale`, `attend_current` and
        `impl`. A process whose sticks are all below `skip_threshold` asks for no older keys.
        """
        options["skip_threshold"] = skip_threshold
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):

            def attend(chunk: slice, keys: Tensor, values: Tensor) -> StickBreakingOutput:
                return stickbreaking_attention(q[:, :, chunk], keys, values, **options)

            outputs = self.with_all_keys(attend, k, v)
            return StickBreakingOutput(*(torch.cat(each, dim=2) for each in zip(*outputs, strict=True)))
        walk = _Walk(self, q, k, v, options)
        walk.run()
        return StickBreakingOutput(walk.output.to(q.dtype), walk.remainder)

    def with_all_keys(self, attend: Callable[[slice, Tensor, Tensor], Any], k: Tensor, v: Tensor) -> list[Any]:
        """Returns `attend(chunk, keys, values)` for each chunk of this process, with all keys up to the chunk's end.

        `k` and `v` are this process's, [B, G, Q, D], and get gradients from all processes.
        """
        chunk = k.shape[2] // 2
        keys, values = (_Gather.apply(each, self) for each in (k, v))  # type: ignore[no-untyped-call]
        return [
            attend(rows, keys[:, :, : start + chunk], values[:, :, : start + chunk])
            for rows, start in zip((slice(0, chunk), slice(chunk, 2 * chunk)), self._starts(chunk), strict=True)
        ]

    def _room_for_parts(self, own: Tensor) -> list[Tensor]:
        return [torch.empty_like(own, memory_format=torch.contiguous_format) for _ in range(self.ranks)]

    def _starts(self, chunk_tokens: int) -> list[int]:
        return [chunk * chunk_tokens for chunk in chunks_of(self.rank, self.ranks)]


class _Walk:
    """One call of attention without gradients, from this process's own keys to the oldest."""

    def __init__(self, context: ContextParallel, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        self.context, self.options = context, options
        self.q = q
        self.kv = (k, v)
        self.chunk = q.shape[2] // 2
        self.skip_threshold: float | None = options["skip_threshold"]
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.output = torch.empty(q.shape, dtype=dtype, device=q.device)
        self.remainder = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
        self.lists = [pieces(rank, context.ranks, self.chunk) for rank in range(context.ranks)]
        self.place = 0

    def run(self) -> None:
        """Fills `output` and `remainder`."""
        for own in (slice(0, self.chunk), slice(self.chunk, 2 * self.chunk)):
            heads = (each[:, :, own] for each in (self.q, *self.kv))
            out = stickbreaking_attention(*heads, **self.options)
            self.output[:, :, own] = out.output
            self.remainder[:, :, own] = out.remainder
        waiting: tuple[Piece, Sequence[Tensor]] | None = None
        while True:
            # ask for the next piece before computing this one: it arrives meanwhile
            asked = self._asked_by_all()
            coming = self._exchange(asked)
            if waiting is not None:
                self._add(*waiting)
            if all(index is None for index in asked):
                break
            waiting = coming()
        rank = self.context.rank
        others = [piece for piece in self.lists[rank] if piece.holder != rank]
        self.context.transfers.whole_bytes += sum(map(self._bytes, others))

    def _asked_by_all(self) -> list[int | None]:
        """Which of its pieces each process asks for next; None if it needs no more."""
        mine = self._next()
        if self.skip_threshold is None:
            # no process skips a piece: all are at the same place
            return [self.place if self.place < len(pieces) else None for pieces in self.lists]
        wanted = torch.tensor([-1 if mine is None else mine], device=self.q.device)
        indices = [torch.empty_like(wanted) for _ in self.lists]
        dist.all_gather(indices, wanted, group=self.context.group)
        return [None if index < 0 else index for index in torch.cat(indices).tolist()]

    def _next(self) -> int | None:
        pieces = self.lists[self.context.rank]
        if self.skip_threshold is not None:
            halves = self.remainder.chunk(2, dim=2)
            older, newer = (bool((remainder >= self.skip_threshold).any()) for remainder in halves)
            while self.place < len(pieces) and not (newer or (older and pieces[self.place].of_both)):
                self.place = self.place + 1 if older else len(pieces)
        return self.place if self.place < len(pieces) else None

    def _exchange(self, asked: list[int | None]) -> Callable[[], tuple[Piece, Sequence[Tensor]] | None]:
        """Starts sending and receiving; returns a function that waits for the piece this process asked for."""
        context = self.context
        operations: list[dist.P2POp] = []
        coming: tuple[Piece, Sequence[Tensor]] | None = None
        for rank, index in enumerate(asked):
            if index is None:
                continue
            piece = self.lists[rank][index]
            if rank == context.rank:
                self.place = index + 1
                if piece.holder == rank:
                    coming = (piece, self._own(piece))
                else:
                    shape = (2, *self.kv[0].shape[:2], piece.stop - piece.start, self.q.shape[3])
                    buffer = torch.empty(shape, dtype=self.q.dtype, device=self.q.device)
                    coming = (piece, buffer.unbind())
                    operations.append(_operation(dist.irecv, buffer, piece.holder, context))
                    context.transfers.received_bytes += self._bytes(piece)
            elif piece.holder == context.rank:
                operations.append(_operation(dist.isend, torch.stack(self._own(piece)), rank, context))
        works = dist.batch_isend_irecv(operations) if operations else []
        if self.skip_threshold is None and asked[context.rank] is None:
            self.place += 1

        def wait() -> tuple[Piece, Sequence[Tensor]] | None:
            for work in works:
                work.wait()
            operations.clear()  # until here they keep what is being sent alive
            return coming

        return wait

    def _own(self, piece: Piece) -> tuple[Tensor, ...]:
        first = self.chunk if piece.newer else 0
        rows = slice(first + piece.start, first + piece.stop)
        return tuple(each[:, :, rows] for each in self.kv)

    def _add(self, piece: Piece, kv: Sequence[Tensor]) -> None:
        rows = slice(0 if piece.of_both else self.chunk, 2 * self.chunk)
        remainder = self.remainder[:, :, rows]
        q = self.q[:, :, rows]
        out = stickbreaking_attention(q, *kv, causal=False, newer_remainder=remainder, **self.options)
        self.output[:, :, rows].addcmul_(remainder[..., None], out.output)
        remainder *= out.remainder

    def _bytes(self, piece: Piece) -> int:
        tokens = self.kv[0].shape[2]
        return 2 * self.kv[0].numel() // tokens * (piece.stop - piece.start) * self.kv[0].element_size()


class _Gather(torch.autograd.Function):
    """[B, G, Q, D] of every process to [B, G, T, D] in sequence order; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        parts = context._room_for_parts(own)
        dist.all_gather(parts, own.contiguous(), group=context.group)
        return _in_order(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        context: ContextParallel = ctx.context
        whole = context.sum(grads[0].to(torch.promote_types(grads[0].dtype, torch.float32), copy=True))
        own = context.positions(whole.shape[2]).to(whole.device)
        return whole.index_select(2, own).to(grads[0].dtype), None


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    """[B, G, Q, D] of each process to [B, G, T, D]."""
    halves = [part.chunk(2, dim=2) for part in parts]
    return torch.cat([older for older, _ in halves] + [newer for _, newer in reversed(halves)], dim=2)


def _operation(kind: Callable[..., Any], tensor: Tensor, peer: int, context: ContextParallel) -> dist.P2POp:
    return dist.P2POp(kind, tensor, group=context.group, group_peer=peer)
