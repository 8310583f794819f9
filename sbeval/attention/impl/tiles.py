"""The blocks of rows and tiles of keys that `blockwise` and `span` visit, and the threads that compute them on a CPU.

Keys are stored newest first, so that sums over newer keys are plain cumulative sums. On a CPU each thread computes
whole blocks of rows, with PyTorch's own threading off: that needs one barrier for the whole call instead of one for
each of about ten operations in every tile. Each head can also stop as soon as its own sticks are spent, that is, as
soon as newer keys have taken nearly all weight.

Shape suffixes: B batch, H query heads, G key/value heads, N batch times key/value heads, n a range of them, S query
heads that share a key/value head, Q queries, R rows of a block (S times its queries), K keys, J keys of a tile, D
head_dim.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

# a tile of 128 KiB in fp32: three of them fit into one core's cache
TILE_ROWS = 128
TILE_LOGITS = 2**15
TILE_KEYS = 4096
# a key with a larger logit takes the whole stick in any precision; larger terms would only round sums
LARGEST_LOGIT = 80.0

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class RowBlock:
    """A range of heads and queries that are computed together.

    Attributes:
        heads: range of batch times key/value heads.
        queries: range of queries.
        index: number of this block of queries, counted from the first.
        first_key: position of the oldest key that one of the rows may see.
        newest: index of the newest visible key, in keys stored newest first.
    """

    heads: slice
    queries: slice
    index: int
    first_key: int
    newest: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries and keys, laid out for visiting the keys newest first, and the blocks of rows.

    Attributes:
        q_NSQD: queries times the scale, in fp32 or wider.
        k_NKD: keys, newest first.
        attend_current: whether a query attends to its own position.
        causal: whether queries are the last positions of the keys; else every key is older than every query.
        seq_start_N: first position after left padding, or None.
        row_blocks: all blocks of rows; those that may visit the most keys come first.
        tile_keys: keys of a tile.
    """

    q_NSQD: Tensor
    k_NKD: Tensor
    attend_current: bool
    causal: bool
    seq_start_N: Tensor | None
    row_blocks: list[RowBlock]
    tile_keys: int

    @classmethod
    def of(
        cls,
        q_BHQD: Tensor,
        k_BGKD: Tensor,
        scale: float,
        attend_current: bool,
        seq_start_B: Tensor | None,
        cu_seqlens: Tensor | None,
        cu_seqlens_k: Tensor | None = None,
        causal: bool = True,
    ) -> "Tiles":
        """Lays out the inputs of `stickbreaking_attention` and cuts them into blocks of rows."""
        batch, heads, queries, head_dim = q_BHQD.shape
        groups, keys = k_BGKD.shape[1], k_BGKD.shape[2]
        shared = heads // groups
        starts = [0] * batch if seq_start_B is None else seq_start_B.clamp_min(0).tolist()
        bounds = [0, queries] if cu_seqlens is None else cu_seqlens.tolist()
        key_bounds = [0, keys] if cu_seqlens is None else bounds if cu_seqlens_k is None else cu_seqlens_k.tolist()
        longest = max(stop - start for start, stop in itertools.pairwise(bounds))
        rows = max(1, min(longest, TILE_ROWS // shared))
        tile_keys = min(TILE_KEYS, max(1, TILE_LOGITS // (rows * shared)))
        heads_at_once = max(1, batch * groups)
        if q_BHQD.device.type == "cpu":
            visible = longest if cu_seqlens is not None and causal else keys
            heads_at_once = max(1, TILE_LOGITS // max(1, rows * shared * min(tile_keys, visible)))
        row_blocks: list[RowBlock] = []
        first_rows = [
            (first, sequence)
            for sequence, (start, stop) in enumerate(itertools.pairwise(bounds))
            for first in range(start, stop, rows)
        ]
        for index, (first, sequence) in enumerate(first_rows):
            last = min(bounds[sequence + 1], first + rows)
            newest = queries - last + (0 if attend_current else 1) if causal else keys - key_bounds[sequence + 1]
            for head in range(0, batch * groups, heads_at_once):
                some_heads = slice(head, min(batch * groups, head + heads_at_once))
                starts_of_heads = starts[head // groups : (head + heads_at_once - 1) // groups + 1]
                first_key = min(starts_of_heads) if cu_seqlens is None else key_bounds[sequence]
                row_blocks.append(RowBlock(some_heads, slice(first, last), index, first_key, newest))
        dtype = torch.promote_types(q_BHQD.dtype, torch.float32)
        return cls(
            (q_BHQD.to(dtype) * scale).reshape(batch * groups, shared, queries, head_dim),
            newest_first(k_BGKD, dtype),
            attend_current,
            causal,
            None if seq_start_B is None else seq_start_B.repeat_interleave(groups),
            sorted(row_blocks, key=lambda block: block.first_key + block.newest),
            tile_keys,
        )

    def like_keys(self, x_BGKD: Tensor) -> Tensor:
        """Returns [N, K, D] in the layout and dtype of `k_NKD`, newest first."""
        return newest_first(x_BGKD, self.k_NKD.dtype)

    def key_tiles(self, block: RowBlock) -> list[slice]:
        """Returns the tiles of keys that these rows may attend to, newest first."""
        keys = self.k_NKD.shape[1]
        oldest = keys - block.first_key
        return [
            slice(first, min(oldest, first + self.tile_keys)) for first in range(block.newest, oldest, self.tile_keys)
        ]

    def rows(self, tensor_NSQD: Tensor, block: RowBlock) -> Tensor:
        """Returns the block's rows, [n, R, ...], from a tensor [N, S, Q, ...]."""
        return tensor_NSQD[block.heads, :, block.queries].flatten(1, 2)

    def put(self, tensor_NSQD: Tensor, block: RowBlock, rows_nRD: Tensor) -> None:
        """Writes the block's rows [n, R, ...] into a tensor [N, S, Q, ...]; the inverse of `rows`."""
        target = tensor_NSQD[block.heads, :, block.queries]
        target.copy_(rows_nRD.view(target.shape))

    def logits(self, q_nRD: Tensor, block: RowBlock, tile: slice) -> Tensor:
        """Returns the logits of a tile, [n, R, J]; -inf for keys that a row does not see."""
        logits_nRJ = (q_nRD @ self.k_NKD[block.heads, tile].mT).clamp_(max=LARGEST_LOGIT)
        newest_key = self.k_NKD.shape[1] - 1 - tile.start
        length = tile.stop - tile.start
        queries = block.queries.stop - block.queries.start
        first_row = self.k_NKD.shape[1] - self.q_NSQD.shape[2] + block.queries.start
        limit = first_row if self.attend_current else first_row - 1
        if self.causal and newest_key > limit:
            key_J = newest_key - torch.arange(length, device=q_nRD.device)
            limit_Q = torch.arange(limit, limit + queries, device=q_nRD.device)
            unseen_QJ = key_J > limit_Q[:, None]
            logits_nRJ.view(len(logits_nRJ), -1, queries, length).masked_fill_(unseen_QJ, -torch.inf)
        if self.seq_start_N is not None:
            key_J = newest_key - torch.arange(length, device=q_nRD.device)
            logits_nRJ.masked_fill_((key_J < self.seq_start_N[block.heads, None])[:, None], -torch.inf)
        return logits_nRJ


def newest_first(tensor_BGKD: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [N, K, D] in `dtype` with the order of the keys reversed."""
    return tensor_BGKD.to(dtype).flatten(0, 1).flip(1)


def spent(logits_nRJ: Tensor) -> Tensor:
    """Returns softplus(logit): minus the log of the share of the stick that a key leaves to older keys."""
    return softplus(logits_nRJ, threshold=2 * LARGEST_LOGIT)


def most_row_blocks(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> int:
    """Returns an upper bound on the number of blocks of queries that follows from the shapes."""
    rows = max(1, TILE_ROWS // (q.shape[1] // k.shape[1]))
    # if the longest sequence is shorter than a block, blocks are shorter, but at most one for each sequence. The extra
    # one keeps the size above 1: torch.export would derive a bound on the length from a size that can be 1
    return q.shape[2] // rows + (2 if cu_seqlens is None else cu_seqlens.shape[0])


def log_of_least_stick(skip_threshold: float | None, like: Tensor) -> float | None:
    """Returns the log of the stick below which older keys are skipped; None to visit all keys without a check.

    Without a threshold, the loop over the keys on a CPU still ends once a stick underflows to zero in the dtype. On
    other devices that check would cost a transfer to the host.
    """
    if skip_threshold is not None:
        return math.log(skip_threshold)
    if like.device.type != "cpu":
        return None
    return math.log(torch.finfo(like.dtype).tiny) + math.log(torch.finfo(like.dtype).eps / 4)


def in_threads(work: Callable[[Item], None], items: Sequence[Item], device: torch.device) -> None:
    """Calls `work` on every item. On a CPU, as many threads as PyTorch uses take the items one after another."""
    threads = min(torch.get_num_threads(), len(items)) if device.type == "cpu" else 1
    if threads <= 1:
        for item in items:
            work(item)
        return
    waiting = iter(items)

    def run() -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            for item in waiting:
                work(item)

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(run) for _ in range(threads)]:
                done.result()
    finally:
        # threads that start later inherit the number that was set last in any thread
        torch.set_num_threads(before)
