"""Causal entmax attention in blocks of queries: the logits of one block are materialised, with its bias.

With a window, a block is several chunks of queries, whose logits are one batched matmul.

Heads with ALiBi get a window. A key has a weight only if its logit is at most 2 below the query's largest, and logits
without the bias are at most b, the product of the scale and the largest norms of the head's queries and keys. So a key
at distance d has none if b - slope * d < -b - 2, since the query's own key has a logit of at least -b.

Shape suffixes: B batch, H query heads, G key/value heads, M query heads of a key head, Q queries, K keys, D head_dim,
T queries of a block, S keys of a block, N chunks of a block, R rows of a chunk, C keys visible to a chunk.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from sbeval.models.biases import AlibiBias, AlibiOfHeads, alibi
from sbeval.models.entmax.kernel import adasplash_attention, suits_adasplash
from sbeval.models.entmax.weights import entmax15
from sbeval.models.softmax import Bias, rows_of_a_block

BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 29}
"""Limit on the elements of all fp32 tensors of a block, by device type: 16 MiB, and 2 GiB on a GPU.

A GPU would idle with few rows.
"""
TENSORS_OF_A_BLOCK = 4
"""Number of tensors, each as large as a block's logits, that exist at the peak of a block."""
SHORT_TOKENS = 128
"""Up to this many keys, all heads are computed at once: more launches would cost more than the skipped keys save."""
FEW_QUERIES = 16
"""Up to this many queries, as in decode steps, heads get no window: its norms would read all keys once more."""
SHORTEST_CHUNK = 64
"""Smallest number of rows of a chunk; a GPU's matmul computes as many even if fewer are needed."""
_WEIGHT_RANGE = 2.0  # in logits: entmax-1.5 gives no weight to a key further below the largest
_ROUNDING_MARGIN = 1.01


def entmax_attention(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    seq_start_B: Tensor | None = None,
    bias: Bias | None = None,
    position_ids_BQ: Tensor | None = None,
) -> Tensor:
    """Computes causal attention with weights by entmax-1.5, [B, H, Q, D]; arguments as in `softmax_attention`.

    On a GPU, `adasplash` computes heads without a bias if it is installed; see the module `kernel`.
    """
    all_heads_at_once = k_BGKD.shape[2] <= SHORT_TOKENS or q_BHQD.shape[2] <= FEW_QUERIES
    if all_heads_at_once or not isinstance(bias, AlibiBias):
        return _attend(q_BHQD, k_BGKD, v_BGKD, scale, sliding_window, seq_start_B, bias, position_ids_BQ)
    groups = k_BGKD.shape[1]
    members = q_BHQD.shape[1] // groups
    window = min(sliding_window or k_BGKD.shape[2], k_BGKD.shape[2])
    reach_tokens = [min(window, reach) for reach in _reach_tokens(q_BHQD, k_BGKD, scale, bias.slopes)]
    slope_H = bias.slopes_on(q_BHQD.device)
    outputs = []
    for heads in _heads_of_similar_reach(reach_tokens, bias.slopes, members):
        keys = slice(heads.start // members, -(-heads.stop // members))
        run_bias = AlibiOfHeads(slope_H[heads]) if bias.slopes[heads.start] else None
        run_window = max(reach_tokens[heads])
        q, k, v = q_BHQD[:, heads], k_BGKD[:, keys], v_BGKD[:, keys]
        outputs.append(_attend(q, k, v, scale, run_window, seq_start_B, run_bias, position_ids_BQ))
    return torch.cat(outputs, dim=1)


def _heads_of_similar_reach(reach_tokens: list[int], slopes: list[float], members: int) -> Iterator[slice]:
    """Splits the heads into runs that are computed at once: whole key heads, or heads that share one key head.

    Within a run all heads have a slope and reaches within a factor of two, or none has a slope. Reaches shorter than
    the smallest chunk count as equal, since their chunks have the same size.
    """
    first = 0
    while first < len(slopes):
        stop, reaches = first + 1, [max(reach_tokens[first], SHORTEST_CHUNK)]
        while stop < len(slopes) and bool(slopes[stop]) == bool(slopes[first]):
            reaches.append(max(reach_tokens[stop], SHORTEST_CHUNK))
            if max(reaches) > 2 * min(reaches):
                break
            stop += 1
        if first % members or stop - first < members:
            stop = min(stop, first + members - first % members)
        else:
            stop -= (stop - first) % members
        yield slice(first, stop)
        first = stop


@torch.no_grad()
def _reach_tokens(q_BHQD: Tensor, k_BGKD: Tensor, scale: float, slopes: list[float]) -> list[int]:
    """Returns for each head the smallest window that holds every key with a weight; all keys for a slope of 0."""
    query_H, key_G = (x.float().norm(dim=-1).amax(dim=(0, 2)) for x in (q_BHQD, k_BGKD))
    bounds = abs(scale) * query_H * key_G.repeat_interleave(len(slopes) // len(key_G))
    windows = []
    # one transfer from a GPU for all heads
    for bound, slope in zip(bounds.tolist(), slopes, strict=True):
        reach = _ROUNDING_MARGIN * (2 * bound + _WEIGHT_RANGE) / slope if slope else math.inf
        # values that are not finite reach the output, where the caller finds them
        windows.append(math.floor(reach) + 2 if math.isfinite(reach) else k_BGKD.shape[2])
    return windows


def _attend(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    scale: float,
    sliding_window: int | None,
    seq_start_B: Tensor | None,
    bias: Bias | AlibiOfHeads | None,
    position_ids_BQ: Tensor | None,
) -> Tensor:
    batch, heads, queries, _ = q_BHQD.shape
    groups, keys = k_BGKD.shape[1:3]
    window = keys if sliding_window is None else min(sliding_window, keys)
    if bias is None and window == keys and seq_start_B is None and suits_adasplash(q_BHQD, k_BGKD, v_BGKD):
        output_BHQD = adasplash_attention(q_BHQD, k_BGKD, v_BGKD, scale=scale)
        if output_BHQD is not None:
            return output_BHQD
    device, wide = q_BHQD.device, torch.promote_types(q_BHQD.dtype, torch.float32)

    def attend(block: _Block, q: Tensor, k: Tensor, v: Tensor, position_BQ: Tensor | None) -> Tensor:
        chunks, rows, columns = block.chunks, block.rows, block.columns
        q_BHTD, k_BGSD, v_BGSD = (
            _rows(q, block.first_query, block.end_query),
            *(_rows(x, block.first_key, block.end_key) for x in (k, v)),
        )
        key_C = torch.arange(columns, device=device)
        distance_RC = key_C[columns - rows :, None] - key_C
        hidden = (distance_RC < 0) | (distance_RC >= window)
        if seq_start_B is not None or block.first_key < 0:
            first_key_N = block.first_key + rows * torch.arange(chunks, device=device)
            start_B = first_key_N.new_zeros(1) if seq_start_B is None else seq_start_B
            padding_BNC = first_key_N[:, None] + key_C < start_B[:, None, None]
            hidden = hidden | (padding_BNC[:, None, :, None, None] & (distance_RC != 0))
        k_BGNDC, v_BGNDC = (x.unfold(2, columns, rows) for x in (k_BGSD, v_BGSD))
        # autocast would round the logits
        with torch.autocast(device.type, enabled=False):
            # query heads that share a key head are rows of one matmul, so that keys are not copied
            q_BGNMRD = q_BHTD.to(wide).reshape(batch, groups, -1, chunks, rows, q.shape[3]).transpose(2, 3)
            logits_BGNMRC = (scale * (q_BGNMRD.flatten(3, 4) @ k_BGNDC.to(wide))).view(*q_BGNMRD.shape[:5], columns)
            if bias is not None:
                if position_BQ is None:
                    position_BQ = torch.arange(keys - queries, keys, device=device)[None]
                bias_BHRC = bias(_rows(position_BQ, block.first_query, block.end_query, dim=1), distance_RC)
                logits_BGNMRC = logits_BGNMRC + bias_BHRC.view(len(bias_BHRC), groups, 1, -1, rows, columns)
            weights_BGNMRC = entmax15(logits_BGNMRC.masked_fill(hidden, -torch.inf)).to(v.dtype)
            output_BGNMRD = (weights_BGNMRC.flatten(3, 4) @ v_BGNDC.mT).view(*q_BGNMRD.shape[:5], v.shape[3])
        output_BHTD = output_BGNMRD.transpose(2, 3).reshape(batch, heads, chunks * rows, v.shape[3])
        return output_BHTD[:, :, max(0, -block.first_query) :]

    elements = BLOCK_ELEMENTS.get(device.type, BLOCK_ELEMENTS["cpu"]) // (TENSORS_OF_A_BLOCK * batch * heads)
    # the bias of every chunk is the same only if it depends on distances alone
    batched = bias is None or bias.by_distance
    copied = -(-q_BHQD.shape[3] // TENSORS_OF_A_BLOCK)
    blocks = _blocks(queries, keys, window, elements, batched=batched, copied_elements=copied)
    recomputed = torch.is_grad_enabled() and _logits(blocks) > elements
    outputs = []
    for block in blocks:
        arguments = (block, q_BHQD, k_BGKD, v_BGKD, position_ids_BQ)
        if recomputed:
            outputs.append(checkpoint(attend, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(attend(*arguments))
    return torch.cat(outputs, dim=2)


class _Block(NamedTuple):
    """Chunks of `rows` queries that are computed at once; a chunk sees `columns` keys, the last `rows` of which
    are the keys at its queries' positions.

    Indices before the first query or key are negative: those rows are zeros.
    """

    chunks: int
    rows: int
    columns: int
    end_query: int
    """Index after the last query."""
    end_key: int
    """Index after the last key."""

    @property
    def first_query(self) -> int:
        return self.end_query - self.chunks * self.rows

    @property
    def first_key(self) -> int:
        return self.end_key - (self.chunks - 1) * self.rows - self.columns


def _blocks(
    queries: int, keys: int, window: int, elements: int, *, batched: bool, copied_elements: int = 0
) -> list[_Block]:
    """Returns blocks with at most `elements` logits for each head, or one row if a row has more.

    Without a window a block is one chunk. With a window a chunk has about as many rows as the window has keys, and the
    chunks of a block are one batched matmul, unless single chunks or blocks without a window need fewer logits.
    `copied_elements` are counted for each row and each column of a batched chunk, since the matmul copies its queries,
    keys and values.
    """
    without_window = _equal_blocks(queries, keys, keys, rows_of_a_block(queries, keys, keys, elements), 1)
    if window == keys:
        return without_window
    rows = rows_of_a_block(queries, keys, window, elements)
    single = _equal_blocks(queries, keys, window, rows, 1)
    if not batched:
        return min(single, without_window, key=_logits)
    rows = min(rows, max(window, SHORTEST_CHUNK))
    columns = rows + window - 1
    chunk_elements = rows * columns + copied_elements * (rows + columns)
    chunks = _equal_blocks(queries, keys, window, rows, max(1, elements // chunk_elements))
    return min(chunks, single, without_window, key=_logits)


def _logits(blocks: list[_Block]) -> int:
    return sum(block.chunks * block.rows * block.columns for block in blocks)


def _equal_blocks(queries: int, keys: int, window: int, rows: int, chunks_per_block: int) -> list[_Block]:
    chunk_count = -(-queries // rows)
    chunks_per_block = min(chunks_per_block, chunk_count)
    blocks = []
    for end_chunk in range((chunk_count - 1) % chunks_per_block + 1, chunk_count + 1, chunks_per_block):
        chunks = min(end_chunk, chunks_per_block)
        end_query = queries - (chunk_count - end_chunk) * rows
        end_key = keys - queries + end_query
        columns = rows + window - 1
        if chunks == 1:
            columns = min(columns, max(rows, end_key))
        blocks.append(_Block(chunks, rows, columns, end_query, end_key))
    return blocks


def _rows(x: Tensor, start: int, stop: int, *, dim: int = 2) -> Tensor:
    """Returns `x[:, :, start:stop]` for dimension 2, with zeros before the first row if `start` is negative."""
    existing = x.narrow(dim, max(0, start), stop - max(0, start))
    return existing if start >= 0 else pad(existing, [0, 0] * (x.ndim - 1 - dim) + [-start, 0])


def block_bytes(heads: int, key_heads: int, head_dim: int, tokens: int, device_type: str, *, batch: int = 1) -> int:
    """Returns the bytes that a block needs at its peak: its logits and weights, and fp32 copies of its heads.

    Windows overlap, so keys and values are counted twice. `tokens` is the number of tokens in all `batch` sequences,
    which are equally long.
    """
    row = TENSORS_OF_A_BLOCK * heads * tokens
    elements = max(row, min(BLOCK_ELEMENTS[device_type], row * -(-tokens // batch)))
    return torch.float32.itemsize * (elements + (heads + 4 * key_heads) * tokens * head_dim)


def entmax_decode(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    length_B: Tensor,
    *,
    scale: float,
    slope_H: Tensor | None = None,
) -> Tensor:
    """Computes entmax attention of a decode step: each slot's newest Q positions attend to the slot's keys.

    Args:
        q_BHQD: queries of the newest positions.
        k_BGKD: keys of the slots.
        v_BGKD: values of the slots.
        length_B: number of valid keys in each slot, including those of the newest positions; at least Q.
        scale: factor of the logits.
        slope_H: ALiBi's slopes in fp32; the slots must hold all keys of their texts.

    Returns:
        [B, H, Q, D].
    """
    batch, heads, queries, head_dim = q_BHQD.shape
    groups, keys = k_BGKD.shape[1:3]
    wide = torch.promote_types(q_BHQD.dtype, torch.float32)
    last_BQ1 = length_B[:, None, None] - torch.arange(queries, 0, -1, device=length_B.device)[:, None]
    distance_BQK = last_BQ1 - torch.arange(keys, device=length_B.device)
    q_BGND = q_BHQD.to(wide).reshape(batch, groups, -1, head_dim)
    logits_BHQK = (scale * (q_BGND @ k_BGKD.to(wide).mT)).view(batch, heads, queries, keys)
    if slope_H is not None:
        logits_BHQK = logits_BHQK + alibi(slope_H, distance_BQK)
    weights_BHQK = entmax15(logits_BHQK.masked_fill(distance_BQK[:, None] < 0, -torch.inf)).to(v_BGKD.dtype)
    output_BGND = weights_BHQK.view(batch, groups, -1, keys) @ v_BGKD
    return output_BGND.view(batch, heads, queries, v_BGKD.shape[3])
