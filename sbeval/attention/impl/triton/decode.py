"""Decode kernels for a few queries and many keys: programs share the keys (splits), a second kernel joins the splits.

A query's stick is the weight that newer keys leave for older ones. Each split computes (o, R): its output, and the
share of the stick that it leaves. A newer and an older split combine to (o1 + R1 o2, R1 R2), so splits are independent
of each other. Split 0 holds the newest keys. The query heads that share a key head are rows of one tile, and each key
is read once for all of them. At 64K keys, eight heads that share a key head cost what one head costs, within 3 %
(benchmarks/results/decode_h200.md).

With a threshold, a split that ends publishes the share that it leaves of each row's stick. Older splits read it before
they start and while they run, and stop when newer splits have left every row less than the threshold. The join kernel
ends its sum at the first split with that property, so the result does not depend on which splits stopped early.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from sbeval.attention.impl.triton.hardware import has_assembly, multiprocessors
from sbeval.attention.impl.triton.launch import LOG2_E, padded_to_tile
from sbeval.attention.impl.triton.splits import add_tile_of_keys, all_spent, all_spent_by_newer, join

MOST_ROWS = 16
FEWEST_KEYS = 512
MOST_SPLITS = 128


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DecodeParameters:
    """Compile-time and launch parameters of the decode kernels.

    Attributes:
        block_rows: rows of a tile, the queries of the heads that share a key head.
        block_keys: keys of a tile.
        block_head_dim: head_dim padded to a power of two, at least 16.
        chunk_tiles: number of tiles between two checks of the remaining stick; these tiles are software-pipelined.
        splits: how many programs share the keys of a key head.
        first_splits: how many of these programs are launched first, so that the others can read what the newest keys
            leave of the sticks.
        num_warps: warps of a program.
        num_stages: stages of the software pipeline.
    """

    block_rows: int
    block_keys: int
    block_head_dim: int
    chunk_tiles: int
    splits: int
    first_splits: int
    num_warps: int
    num_stages: int


def tile_sizes(head_dim: int, element_bytes: int) -> tuple[int, int, int]:
    """Returns head_dim padded to a power of two, the bytes of one key of that size, and the keys of a tile."""
    padded = padded_to_tile(head_dim)
    row_bytes = padded * element_bytes
    return padded, row_bytes, 64 if row_bytes <= 256 and element_bytes == 2 else 32


def decode_parameters(
    *, rows: int, keys: int, head_dim: int, element_bytes: int, key_heads: int, multiprocessors: int, skipping: bool
) -> DecodeParameters:
    """Returns parameters for `rows` queries per key head, `key_heads` (batch times key/value heads) and `keys` keys."""
    padded, row_bytes, block_keys = tile_sizes(head_dim, element_bytes)
    # about 48 KiB of keys and values in flight for a program, with several programs on a multiprocessor
    num_stages = max(2, min(6, 48 * 1024 // (2 * block_keys * row_bytes)))
    # the host takes some microseconds for each triton.cdiv
    tiles = -(-keys // block_keys)
    wanted_splits = -(-16 * multiprocessors // key_heads)
    fewest_tiles = max(1, 256 // block_keys)
    if skipping:
        # short splits, since a split is skipped as a whole when newer splits have spent the sticks
        wanted_splits = max(wanted_splits, tiles * block_keys // 512)
    splits = max(1, min(wanted_splits, MOST_SPLITS, -(-tiles // fewest_tiles)))
    splits = -(-tiles // -(-tiles // splits))
    newest = max(1, 2048 // (-(-tiles // splits) * block_keys))
    return DecodeParameters(
        block_rows=padded_to_tile(rows),
        block_keys=block_keys,
        block_head_dim=padded,
        chunk_tiles=16,
        splits=splits,
        first_splits=min(newest, splits) if skipping else splits,
        num_warps=4,
        num_stages=num_stages,
    )


@triton.jit(do_not_specialize=["groups", "shared", "queries", "keys", "first_split", "splits", "split_tiles"])
def _split_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, stick_ptr, start_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    groups, shared, queries, keys, first_split, splits, split_tiles, qk_scale, log2_threshold,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr, ATTEND_CURRENT: tl.constexpr, PADDED: tl.constexpr,
    EXACT: tl.constexpr, ASSEMBLY: tl.constexpr, SKIPPING: tl.constexpr,
):  # fmt: skip
    # the newest splits of every key head start first
    split = first_split + tl.program_id(1)
    pair = tl.program_id(0).to(tl.int64)
    batch, group = pair // groups, pair % groups
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    inside = row < shared * queries
    query = row % queries
    q_at = q_ptr + batch * q_stride_b + (group * shared + row // queries) * q_stride_h + query * q_stride_l
    q = tl.load(q_at[:, None] + dim[None, :], mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    k_base = k_ptr + batch * k_stride_b + group * k_stride_h
    v_base = v_ptr + batch * v_stride_b + group * v_stride_h
    row_limit = tl.where(inside, keys - queries + query - (0 if ATTEND_CURRENT else 1), -1)
    seq_start = tl.maximum(tl.load(start_ptr + batch).to(tl.int32), 0) if PADDED else 0
    tile = tl.arange(0, BLOCK_N)
    minus_newer = -(tile[:, None] > tile[None, :]).to(tl.float32 if EXACT else tl.float16)

    out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    stick = tl.zeros([ROWS], tl.float32)
    stick_lo = tl.zeros([ROWS], tl.float32)

    # blocks below `full` are seen by every row
    full = tl.maximum(keys - queries + (1 if ATTEND_CURRENT else 0), 0) // BLOCK_N
    block = tl.cdiv(keys, BLOCK_N) - split * split_tiles
    oldest = tl.maximum(block - split_tiles, seq_start // BLOCK_N)
    first_full = tl.maximum(oldest, tl.cdiv(seq_start, BLOCK_N))
    sticks = stick_ptr + pair * splits * ROWS
    spent_out = log2_threshold > 1.0
    if SKIPPING:
        spent_out = all_spent_by_newer(sticks, split, inside, log2_threshold, ROWS, SPLITS)
    while (spent_out == 0) & (block > oldest) & (block > full):
        block -= 1
        out, stick, stick_lo = add_tile_of_keys(
            q, k_base, v_base, k_stride_l, v_stride_l, block, keys, row_limit, seq_start, minus_newer, out, stick,
            stick_lo, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT, ASSEMBLY,
        )  # fmt: skip
    while (spent_out == 0) & (block > first_full):
        steps = tl.minimum(block - first_full, CHUNK)
        for step in tl.range(0, steps, num_stages=STAGES):
            out, stick, stick_lo = add_tile_of_keys(
                q, k_base, v_base, k_stride_l, v_stride_l, block - 1 - step, keys, row_limit, seq_start, minus_newer,
                out, stick, stick_lo, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_N, False, EXACT, ASSEMBLY,
            )  # fmt: skip
        block -= steps
        spent_out = all_spent(stick, inside, log2_threshold, 0)
        if SKIPPING:
            spent_out |= all_spent_by_newer(sticks, split, inside, log2_threshold, ROWS, SPLITS)
    if PADDED:
        while (spent_out == 0) & (block > oldest):
            block -= 1
            out, stick, stick_lo = add_tile_of_keys(
                q, k_base, v_base, k_stride_l, v_stride_l, block, keys, row_limit, seq_start, minus_newer, out, stick,
                stick_lo, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT, ASSEMBLY,
            )  # fmt: skip

    partial_offset = (pair * splits + split) * ROWS + row
    tl.store(partial_ptr + partial_offset[:, None] * HEAD_DIM + dim[None, :], out,
             mask=inside[:, None] & (dim < HEAD_DIM)[None, :])  # fmt: skip
    tl.store(sticks + split * ROWS + row, stick + stick_lo, mask=inside)


@triton.jit(do_not_specialize=["groups", "shared", "queries", "splits"])
def _join_kernel(
    partial_ptr, stick_ptr, out_ptr, rem_ptr, out_stride_b, out_stride_h, out_stride_l,
    groups, shared, queries, splits, log2_threshold,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    join(
        partial_ptr, stick_ptr, out_ptr, rem_ptr, out_stride_b, out_stride_h, out_stride_l,
        groups, shared, queries, splits, splits, log2_threshold, HEAD_DIM, BLOCK_D, ROWS, TOGETHER, False,
    )  # fmt: skip


def suits_decode(q: Tensor, k: Tensor) -> bool:
    """Whether `decode` is the faster kernel: few queries for each key head and many keys."""
    rows = q.shape[1] // k.shape[1] * q.shape[2]
    return q.shape[0] > 0 and 0 < rows <= MOST_ROWS and k.shape[2] >= FEWEST_KEYS


def decode(
    q: Tensor, k: Tensor, v: Tensor, scale: float, attend_current: bool, seq_start: Tensor | None,
    log2_threshold: float, *, skipping: bool, parameters: DecodeParameters | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes stick-breaking attention of the last few positions over all keys, without gradients.

    q is [B, H, Q, D] with H / G * Q up to 64, k and v are [B, G, K, D] and may be views of a longer cache. Last
    dimensions are contiguous. Keys are not visited once the log2 of the stick is below `log2_threshold`. `skipping`
    runs the newest splits first and lets older splits stop early. At the threshold `LOG2_NOTHING_LEFT`, at which
    nothing is lost, `skipping` changes no bit of the output and costs one more launch.

    Returns:
        Output like q and remainder [B, H, Q] in fp32.
    """
    batch, heads, queries, head_dim = q.shape
    groups, keys = k.shape[1], k.shape[2]
    rows = heads // groups * queries
    p = parameters or decode_parameters(
        rows=rows, keys=keys, head_dim=head_dim, element_bytes=q.element_size(), key_heads=batch * groups,
        multiprocessors=multiprocessors(q), skipping=skipping,
    )  # fmt: skip
    out = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    remainder = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    part = torch.empty((batch * groups, p.splits, p.block_rows, head_dim), dtype=torch.float32, device=q.device)
    # 0 means that a split has not published its share yet
    make = torch.zeros if skipping else torch.empty
    stick = make((batch * groups, p.splits, p.block_rows), dtype=torch.float32, device=q.device)
    power = 1 << (p.splits - 1).bit_length()
    tiles = -(-keys // p.block_keys)
    split_tiles = -(-tiles // p.splits)
    for first, last in ((0, p.first_splits), (p.first_splits, p.splits)):
        if first == last:
            continue
        _split_kernel[(batch * groups, last - first)](
            q, k, v, part, stick, q if seq_start is None else seq_start,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            groups, heads // groups, queries, keys, first, p.splits, split_tiles,
            scale * LOG2_E, log2_threshold,
            HEAD_DIM=head_dim, BLOCK_D=p.block_head_dim, ROWS=p.block_rows, BLOCK_N=p.block_keys,
            SPLITS=power if skipping else 1,
            CHUNK=p.chunk_tiles, STAGES=p.num_stages, ATTEND_CURRENT=attend_current, PADDED=seq_start is not None,
            EXACT=q.dtype == torch.float32, ASSEMBLY=has_assembly(q), SKIPPING=skipping, num_warps=p.num_warps,
        )  # fmt: skip
    _join_kernel[(batch * groups, rows)](
        part, stick, out, remainder, *out.stride()[:3], groups, heads // groups, queries, p.splits, log2_threshold,
        HEAD_DIM=head_dim, BLOCK_D=p.block_head_dim, ROWS=p.block_rows, TOGETHER=min(power, 32),
        num_warps=4,
    )  # fmt: skip
    return out, remainder
