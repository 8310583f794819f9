"""Decode kernels for a KV cache with slots: the number of keys of each text is read from device memory.

As in `decode`, programs share the keys of a text (splits) and a second kernel joins the splits. Here the host does not
know the lengths, so a CUDA graph can replay the same launch while texts grow. Each program computes its range of keys
from the length on the device and returns if the range is empty. A head reads no older keys if the newest splits have
taken all weight of its queries (spent their sticks).

Shape suffixes: B slots, H query heads, G key/value heads, Q newest positions, K keys that fit in a slot, D head_dim.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sbeval.attention.impl.triton.decode import (
    MOST_SPLITS,
    DecodeParameters,
    tile_sizes,
)
from sbeval.attention.impl.triton.hardware import (
    has_assembly,
    multiprocessors,
    on_device_of,
    shared_memory_bytes,
    starts_early,
)
from sbeval.attention.impl.triton.launch import LOG2_E, padded_to_tile
from sbeval.attention.impl.triton.splits import (
    add_tile_of_keys,
    all_spent,
    all_spent_by_newer,
    join,
)

_FIRST_KEYS = 2048
_SHARED_MEMORY_BYTES = 227 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SlotParameters(DecodeParameters):
    """Compile-time and launch parameters of the slot kernels; at most `splits` programs share the keys of a key head.

    Attributes:
        fewest_tiles: the smallest number of tiles of a split, unless it is the last one.
        joined_splits: splits that the join kernel adds at a time, a power of two.
    """

    fewest_tiles: int
    joined_splits: int


def slot_parameters(
    *, rows: int, room: int, head_dim: int, element_bytes: int, key_heads: int, multiprocessors: int, skipping: bool,
    shared_memory_bytes: int = 0,
) -> SlotParameters:  # fmt: skip
    """Returns parameters for `rows` queries per key head, `key_heads` (slots times key heads) and slots of `room` keys.

    Two programs share the `shared_memory_bytes` of a multiprocessor; 0 means those of an H100.
    """
    padded, row_bytes, block_keys = tile_sizes(head_dim, element_bytes)
    tiles = -(-room // block_keys)
    fewest_tiles = max(1, 64 // block_keys)
    # four programs per multiprocessor; twelve if most stop early because sticks are spent; up to sixteen for few splits
    wanted = -(-(12 if skipping else 4) * multiprocessors // key_heads)
    wanted = max(wanted, min(32, 16 * multiprocessors // key_heads))
    splits = max(1, min(wanted, MOST_SPLITS, tiles // fewest_tiles))
    # _FIRST_KEYS keys spend the sticks of most trained heads; a second launch pays off only in longer texts
    looks = skipping and room >= 4 * _FIRST_KEYS
    first_splits = -(-_FIRST_KEYS * splits // max(room, 1)) if looks else splits
    return SlotParameters(
        block_rows=padded_to_tile(rows),
        block_keys=block_keys,
        block_head_dim=padded,
        chunk_tiles=max(1, (512 if skipping else 1024) // block_keys),
        splits=splits,
        fewest_tiles=fewest_tiles,
        first_splits=min(first_splits, splits),
        num_stages=max(2, min(3, (shared_memory_bytes or _SHARED_MEMORY_BYTES) // 2 // (2 * block_keys * row_bytes))),
        num_warps=2 if row_bytes <= 128 and rows <= 16 else 4,
        joined_splits=min(1 << (splits - 1).bit_length(), 128 if padded <= 64 and rows <= 16 else 32),
    )


@triton.jit
def _tiles_of(length_ptr, batch, splits, FEWEST: tl.constexpr, BLOCK_N: tl.constexpr, ATTEND_CURRENT: tl.constexpr):
    """Returns the number of keys that the newest query sees, the number of their tiles, and the tiles of a split."""
    visible = tl.load(length_ptr + batch).to(tl.int32) - (0 if ATTEND_CURRENT else 1)
    tiles = tl.cdiv(visible, BLOCK_N)
    return visible, tiles, tl.maximum(tl.cdiv(tiles, splits), FEWEST)


@triton.jit(do_not_specialize=["groups", "shared", "queries", "first_split", "first_splits", "splits"])
def _split_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, stick_ptr, length_ptr,
    q_stride_b, q_stride_h, q_stride_l, k_stride_b, k_stride_h, k_stride_l, v_stride_b, v_stride_h, v_stride_l,
    groups, shared, queries, first_split, first_splits, splits, qk_scale, log2_threshold,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    FIRST_POWER: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, FEWEST: tl.constexpr,
    ATTEND_CURRENT: tl.constexpr, EXACT: tl.constexpr, ASSEMBLY: tl.constexpr, LOOK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    split = first_split + tl.program_id(1)
    pair = tl.program_id(0).to(tl.int64)
    batch, group = pair // groups, pair % groups
    visible, tiles, split_tiles = _tiles_of(length_ptr, batch, splits, FEWEST, BLOCK_N, ATTEND_CURRENT)
    # lengths are fixed for the whole decode step and may be read before the previous kernel ends, which writes all
    # other inputs
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    block = tiles - split * split_tiles
    if block <= 0:
        return
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, BLOCK_D)
    inside = row < shared * queries
    head, query = group * shared + row // queries, row % queries
    sticks = stick_ptr + pair * splits * ROWS
    if LOOK:
        # the first splits ran in an earlier launch, and each of them has keys if this split has.
        # This variable has another name than the one below: Triton 3.7 cannot compile this early return if the variable
        # is assigned again later
        spent_before = all_spent_by_newer(sticks, first_splits, inside, log2_threshold, ROWS, FIRST_POWER)
        if spent_before:
            # the join reads this split's stick before it knows that it does not need the split
            tl.store(sticks + split * ROWS + row, tl.zeros([ROWS], tl.float32), mask=inside)
            return
    q_at = q_ptr + batch * q_stride_b + head * q_stride_h + query * q_stride_l
    q = tl.load(q_at[:, None] + dim[None, :], mask=inside[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    k_base = k_ptr + batch * k_stride_b + group * k_stride_h
    v_base = v_ptr + batch * v_stride_b + group * v_stride_h
    row_limit = tl.where(inside, visible - queries + query, -1)
    tile = tl.arange(0, BLOCK_N)
    minus_newer = -(tile[:, None] > tile[None, :]).to(tl.float32 if EXACT else tl.float16)
    out = tl.zeros([ROWS, BLOCK_D], tl.float32)
    stick = tl.zeros([ROWS], tl.float32)
    stick_lo = tl.zeros([ROWS], tl.float32)

    oldest = tl.maximum(block - split_tiles, 0)
    # partly filled tiles, and tiles that not every query sees
    while (block > oldest) & (block * BLOCK_N > visible - queries + 1):
        block -= 1
        out, stick, stick_lo = add_tile_of_keys(
            q, k_base, v_base, k_stride_l, v_stride_l, block, visible, row_limit, 0, minus_newer, out, stick, stick_lo,
            qk_scale, HEAD_DIM, BLOCK_D, BLOCK_N, True, EXACT, ASSEMBLY,
        )  # fmt: skip
    spent_out = all_spent(stick, inside, log2_threshold, 0)
    # the newest keys may spend a stick at once, so the first check comes early; each check empties the pipeline
    chunk = CHUNK if LOOK else 1
    while (spent_out == 0) & (block > oldest):
        chunk = tl.minimum(2 * chunk, CHUNK)
        steps = tl.minimum(block - oldest, chunk)
        for step in tl.range(0, steps, num_stages=STAGES):
            out, stick, stick_lo = add_tile_of_keys(
                q, k_base, v_base, k_stride_l, v_stride_l, block - 1 - step, visible, row_limit, 0, minus_newer,
                out, stick, stick_lo, qk_scale, HEAD_DIM, BLOCK_D, BLOCK_N, False, EXACT, ASSEMBLY,
            )  # fmt: skip
        block -= steps
        spent_out = all_spent(stick, inside, log2_threshold, 0)

    partial_offset = (pair * splits + split) * ROWS + row
    tl.store(partial_ptr + partial_offset[:, None] * HEAD_DIM + dim[None, :], out,
             mask=inside[:, None] & (dim < HEAD_DIM)[None, :])  # fmt: skip
    tl.store(sticks + split * ROWS + row, stick + stick_lo, mask=inside)


@triton.jit(do_not_specialize=["groups", "shared", "queries", "splits"])
def _join_kernel(
    partial_ptr, stick_ptr, out_ptr, rem_ptr, length_ptr, out_stride_b, out_stride_h, out_stride_l,
    groups, shared, queries, splits, log2_threshold,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, TOGETHER: tl.constexpr,
    FEWEST: tl.constexpr, ATTEND_CURRENT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64) // groups
    _, tiles, split_tiles = _tiles_of(length_ptr, batch, splits, FEWEST, BLOCK_N, ATTEND_CURRENT)
    # lengths are fixed for the whole decode step and may be read before the previous kernel ends, which writes all
    # other inputs
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    join(
        partial_ptr, stick_ptr, out_ptr, rem_ptr, out_stride_b, out_stride_h, out_stride_l, groups, shared, queries,
        splits, tl.cdiv(tiles, split_tiles), log2_threshold, HEAD_DIM, BLOCK_D, ROWS, TOGETHER, True,
    )  # fmt: skip


def decode_slots(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, length_B: Tensor, scale: float, attend_current: bool,
    log2_threshold: float, *, skipping: bool = True, parameters: SlotParameters | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Computes stick-breaking attention of each slot's newest positions over the slot's keys, without gradients.

    Last dimensions are contiguous, and H / G * Q is at most 64. `length_B`, integers on the device, is the number of
    keys of each slot, including those at the queries' positions. Cache entries after these keys may hold any finite
    values. Keys are not visited once the log2 of the stick is below `log2_threshold`. `skipping` runs the newest keys
    in a separate first launch, which pays off if they spend the sticks.

    Returns:
        Output [B, H, Q, D] in q's dtype and remainder [B, H, Q] in fp32.
    """
    batch, heads, queries, head_dim = q_BHQD.shape
    groups, room = k_BGKD.shape[1], k_BGKD.shape[2]
    shared = heads // groups
    p = parameters or slot_parameters(
        rows=shared * queries, room=room, head_dim=head_dim, element_bytes=q_BHQD.element_size(),
        key_heads=batch * groups, multiprocessors=multiprocessors(q_BHQD), skipping=skipping,
        shared_memory_bytes=shared_memory_bytes(q_BHQD),
    )  # fmt: skip
    out = torch.empty((batch, queries, heads, head_dim), dtype=q_BHQD.dtype, device=q_BHQD.device).transpose(1, 2)
    remainder = torch.empty((batch, heads, queries), dtype=torch.float32, device=q_BHQD.device)
    part = torch.empty((batch * groups, p.splits, p.block_rows, head_dim), dtype=torch.float32, device=q_BHQD.device)
    stick = torch.empty((batch * groups, p.splits, p.block_rows), dtype=torch.float32, device=q_BHQD.device)
    early = starts_early(q_BHQD)
    options = {"launch_pdl": True} if early else {}
    with on_device_of(q_BHQD):
        for first, last in ((0, p.first_splits), (p.first_splits, p.splits)):
            if first == last:
                continue
            _split_kernel[(batch * groups, last - first)](
                q_BHQD, k_BGKD, v_BGKD, part, stick, length_B,
                *q_BHQD.stride()[:3], *k_BGKD.stride()[:3], *v_BGKD.stride()[:3],
                groups, shared, queries, first, p.first_splits, p.splits, scale * LOG2_E, log2_threshold,
                HEAD_DIM=head_dim, BLOCK_D=p.block_head_dim, ROWS=p.block_rows, BLOCK_N=p.block_keys,
                FIRST_POWER=1 << (p.first_splits - 1).bit_length() if first else 1,
                CHUNK=p.chunk_tiles, STAGES=p.num_stages, FEWEST=p.fewest_tiles,
                ATTEND_CURRENT=attend_current, EXACT=q_BHQD.dtype == torch.float32, ASSEMBLY=has_assembly(q_BHQD),
                LOOK=first > 0, EARLY=early, num_warps=p.num_warps, **options,
            )  # fmt: skip
        _join_kernel[(batch * groups, shared * queries)](
            part, stick, out, remainder, length_B, *out.stride()[:3], groups, shared, queries, p.splits, log2_threshold,
            HEAD_DIM=head_dim, BLOCK_D=p.block_head_dim, ROWS=p.block_rows, BLOCK_N=p.block_keys,
            TOGETHER=p.joined_splits, FEWEST=p.fewest_tiles, ATTEND_CURRENT=attend_current,
            EARLY=early, num_warps=4, **options,
        )  # fmt: skip
    return out, remainder
