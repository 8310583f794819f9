"""Context parallelism: the ranks of a process group share one sequence, each of them holds two chunks of its tokens.

For N ranks a sequence is cut into 2 N chunks of equal length. Rank r holds chunks r and 2 N - 1 - r, its older and its
newer chunk, so every rank computes equally many query-key pairs. Only attention needs tokens of other ranks.

Stick-breaking attention visits keys from newest to oldest; a query's stick is the weight that the visited keys leave
for older ones. So keys are received in that order, in ranges that grow. Each range is received while
attention to the previous range is computed. A rank whose sticks are all below the threshold requests no older range.
With gradients, and for softmax attention, the keys and values of the whole sequence are all-gathered first.

Shape suffixes: B batch, H query heads, G key/value heads, Q positions of this rank, C positions of a chunk, T all
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
from sbeval.attention.zigzag import KeyRange, chunks_of, key_ranges


@dataclasses.dataclass(kw_only=True, slots=True)
class Transfers:
    """Bytes of keys and values that this rank has received, and those that it would have received without skipping.

    Attributes:
        received_bytes: received from other ranks.
        whole_bytes: bytes that this rank would have received if it had skipped no range.
    """

    received_bytes: int = 0
    whole_bytes: int = 0


class ContextParallel:
    """A process group whose ranks process each sequence together. `group` None means the default group, all ranks."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.ranks = dist.get_world_size(self.group)
        self.transfers = Transfers()
        self.active = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside this context, models that hold this object treat their inputs as this rank's chunks of a sequence."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def padded_tokens(self, tokens: int) -> int:
        """Returns a sequence's length after right-padding to equal chunks; causal attention never sees the padding."""
        return -(-tokens // (2 * self.ranks)) * 2 * self.ranks

    def positions(self, tokens: int) -> Tensor:
        """Returns int64 [Q]: the positions of the sequence that this rank holds. `tokens` is the padded length."""
        chunk = tokens // (2 * self.ranks)
        return torch.cat([torch.arange(start, start + chunk) for start in self._starts(chunk)])

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduces (sums) a tensor in place. All ranks must call it."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather_objects(self, item: Any) -> list[Any]:
        """All-gathers a Python object: returns each rank's item, in rank order. All ranks must call it."""
        items: list[Any] = [None] * self.ranks
        dist.all_gather_object(items, item, group=self.group)
        return items

    def from_rank(self, rank: int, item: Any) -> Any:
        """Broadcasts a Python object: returns the item that `rank` passed. All ranks must call it."""
        items = [item]
        dist.broadcast_object_list(items, group=self.group, group_src=rank)
        return items[0]

    def gather(self, local: Tensor, rank: int) -> Tensor | None:
        """Gathers each rank's `local` [B, G, Q, D] on `rank`: [B, G, T, D] in sequence order there, None elsewhere.

        All ranks must call it.
        """
        by_rank = self._empty_for_each_rank(local) if rank == self.rank else None
        dist.gather(local.contiguous(), by_rank, group=self.group, group_dst=rank)
        return None if by_rank is None else _in_sequence_order(by_rank)

    def stickbreaking_attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, skip_threshold: float | None = None, **options: Any
    ) -> StickBreakingOutput:
        """Computes `sbeval.stickbreaking_attention` for this rank's queries over the keys of all ranks.

        All ranks must call it. q is [B, H, Q, D], k and v are [B, G, Q, D] of the same positions; `options` are
        `scale`, `attend_current` and `impl`. A rank whose sticks are all below `skip_threshold` requests no older keys.
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
        """Returns `attend(chunk, keys, values)` for each chunk of this rank, with all keys up to the chunk's end.

        `k` and `v` [B, G, Q, D] are the keys and values of this rank. They get gradients from all ranks.
        """
        chunk = k.shape[2] // 2
        keys, values = (_Gather.apply(each, self) for each in (k, v))  # type: ignore[no-untyped-call]
        return [
            attend(rows, keys[:, :, : start + chunk], values[:, :, : start + chunk])
            for rows, start in zip((slice(0, chunk), slice(chunk, 2 * chunk)), self._starts(chunk), strict=True)
        ]

    def _empty_for_each_rank(self, local: Tensor) -> list[Tensor]:
        return [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(self.ranks)]

    def _starts(self, chunk_tokens: int) -> list[int]:
        return [chunk * chunk_tokens for chunk in chunks_of(self.rank, self.ranks)]


class _Walk:
    """One call of stick-breaking attention without gradients: visits the keys of all ranks, newest to oldest."""

    def __init__(self, context: ContextParallel, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        self.context, self.options = context, options
        self.q = q
        self.kv = (k, v)
        self.chunk = q.shape[2] // 2
        self.skip_threshold: float | None = options["skip_threshold"]
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.output = torch.empty(q.shape, dtype=dtype, device=q.device)
        self.remainder = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
        self.ranges_by_rank = [key_ranges(rank, context.ranks, self.chunk) for rank in range(context.ranks)]
        self.next_index = 0

    def run(self) -> None:
        """Fills `output` and `remainder`."""
        for local_chunk in (slice(0, self.chunk), slice(self.chunk, 2 * self.chunk)):
            qkv = (each[:, :, local_chunk] for each in (self.q, *self.kv))
            out = stickbreaking_attention(*qkv, **self.options)
            self.output[:, :, local_chunk] = out.output
            self.remainder[:, :, local_chunk] = out.remainder
        received: tuple[KeyRange, Sequence[Tensor]] | None = None
        while True:
            # request the next range before computing the received one, so that transfer and computation overlap
            requested = self._requested_by_rank()
            wait_for_keys = self._exchange(requested)
            if received is not None:
                self._add(*received)
            if all(index is None for index in requested):
                break
            received = wait_for_keys()
        rank = self.context.rank
        remote_ranges = [key_range for key_range in self.ranges_by_rank[rank] if key_range.holder != rank]
        self.context.transfers.whole_bytes += sum(map(self._bytes, remote_ranges))

    def _requested_by_rank(self) -> list[int | None]:
        """Returns for each rank the index of the range that it requests next, None if it needs no more."""
        local_request = self._next()
        if self.skip_threshold is None:
            # without skipping, all ranks are at the same index
            return [
                self.next_index if self.next_index < len(rank_ranges) else None for rank_ranges in self.ranges_by_rank
            ]
        request = torch.tensor([-1 if local_request is None else local_request], device=self.q.device)
        requests = [torch.empty_like(request) for _ in self.ranges_by_rank]
        dist.all_gather(requests, request, group=self.context.group)
        return [None if index < 0 else index for index in torch.cat(requests).tolist()]

    def _next(self) -> int | None:
        """Returns the index of the next range that a query of this rank can still see, None if there is none."""
        local_ranges = self.ranges_by_rank[self.context.rank]
        if self.skip_threshold is not None:
            halves = self.remainder.chunk(2, dim=2)
            older, newer = (bool((remainder >= self.skip_threshold).any()) for remainder in halves)
            while self.next_index < len(local_ranges) and not (
                newer or (older and local_ranges[self.next_index].of_both)
            ):
                self.next_index = self.next_index + 1 if older else len(local_ranges)
        return self.next_index if self.next_index < len(local_ranges) else None

    def _exchange(self, requested: list[int | None]) -> Callable[[], tuple[KeyRange, Sequence[Tensor]] | None]:
        """Starts sending and receiving; returns a function that waits for the range that this rank requested."""
        context = self.context
        operations: list[dist.P2POp] = []
        incoming: tuple[KeyRange, Sequence[Tensor]] | None = None
        for rank, index in enumerate(requested):
            if index is None:
                continue
            key_range = self.ranges_by_rank[rank][index]
            if rank == context.rank:
                self.next_index = index + 1
                if key_range.holder == rank:
                    incoming = (key_range, self._local_keys(key_range))
                else:
                    shape = (2, *self.kv[0].shape[:2], key_range.stop - key_range.start, self.q.shape[3])
                    buffer = torch.empty(shape, dtype=self.q.dtype, device=self.q.device)
                    incoming = (key_range, buffer.unbind())
                    operations.append(_p2p_op(dist.irecv, buffer, key_range.holder, context))
                    context.transfers.received_bytes += self._bytes(key_range)
            elif key_range.holder == context.rank:
                operations.append(_p2p_op(dist.isend, torch.stack(self._local_keys(key_range)), rank, context))
        works = dist.batch_isend_irecv(operations) if operations else []
        if self.skip_threshold is None and requested[context.rank] is None:
            self.next_index += 1

        def wait() -> tuple[KeyRange, Sequence[Tensor]] | None:
            for work in works:
                work.wait()
            operations.clear()  # the operations keep the tensors alive that are being sent
            return incoming

        return wait

    def _local_keys(self, key_range: KeyRange) -> tuple[Tensor, ...]:
        first = self.chunk if key_range.newer else 0
        rows = slice(first + key_range.start, first + key_range.stop)
        return tuple(each[:, :, rows] for each in self.kv)

    def _add(self, key_range: KeyRange, kv: Sequence[Tensor]) -> None:
        rows = slice(0 if key_range.of_both else self.chunk, 2 * self.chunk)
        remainder = self.remainder[:, :, rows]
        q = self.q[:, :, rows]
        out = stickbreaking_attention(q, *kv, causal=False, newer_remainder=remainder, **self.options)
        self.output[:, :, rows].addcmul_(remainder[..., None], out.output)
        remainder *= out.remainder

    def _bytes(self, key_range: KeyRange) -> int:
        tokens = self.kv[0].shape[2]
        return 2 * self.kv[0].numel() // tokens * (key_range.stop - key_range.start) * self.kv[0].element_size()


class _Gather(torch.autograd.Function):
    """All-gathers [B, G, Q, D] of each rank to [B, G, T, D] in sequence order; gradients are all-reduced (summed)."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        by_rank = context._empty_for_each_rank(local)
        dist.all_gather(by_rank, local.contiguous(), group=context.group)
        return _in_sequence_order(by_rank)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        context: ContextParallel = ctx.context
        summed = context.sum(grads[0].to(torch.promote_types(grads[0].dtype, torch.float32), copy=True))
        local_positions = context.positions(summed.shape[2]).to(summed.device)
        return summed.index_select(2, local_positions).to(grads[0].dtype), None


def _in_sequence_order(by_rank: Sequence[Tensor]) -> Tensor:
    """Joins each rank's two chunks [B, G, Q, D] to [B, G, T, D] in the order of the sequence."""
    halves = [tensor.chunk(2, dim=2) for tensor in by_rank]
    return torch.cat([older for older, _ in halves] + [newer for _, newer in reversed(halves)], dim=2)


def _p2p_op(kind: Callable[..., Any], tensor: Tensor, peer: int, context: ContextParallel) -> dist.P2POp:
    return dist.P2POp(kind, tensor, group=context.group, group_peer=peer)
