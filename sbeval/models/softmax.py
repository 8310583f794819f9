"""Causal softmax attention of the baselines, without an [L, L] tensor in memory.

Plain causal attention is `scaled_dot_product_attention`; for long texts on an H100 or H200, cuDNN attention in chunks
of keys that fit the L2 cache, or FlexAttention for small heads. A mask or bias is computed by FlexAttention's kernel
where it is faster (`suits_flex`). Otherwise attention runs in blocks of queries, with a mask for each block. If a mask
depends only on the distance, it is computed once, and every block takes the columns that it needs. Any other mask is
computed separately for each block, and again in the backward pass.

Shape suffixes: B batch, H query heads, G key/value heads, Q queries, K keys, D head_dim, R rows of a block, C keys
visible to a block.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from sbeval.models.flex import ScoreMod, compiled_flex_attention, long_flex_attention, suits_flex, suits_long_flex
from sbeval.models.kernels.devices import OptionalKernel, is_hopper

MASK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Limit on the elements of one block's mask or bias, by device type."""
_MORE_WITHOUT_GRADIENTS = {"cuda": 8}
"""Factor on `MASK_ELEMENTS` without gradients, since blocks with few rows leave a GPU idle."""
_MULTIPLE = 16
_MASK_BYTES = 16
CACHED_BYTES = 32 * 2**20
"""Bytes of keys and values of one head that stay in an H200's L2 cache (60 MB) while cuDNN's kernel reads them.

Longer texts are chunked. With head_dim 128, cuDNN reaches 588 TFLOP/s at 64K tokens, 556 at 128K and 524 at 256K; in
chunks 590 at 128K and 600 at 256K. With head_dim 256, it reaches 592 at 64K and 561 at 128K; in chunks 618 and 630
(cuDNN 9.19, bf16).
"""
_chunked_cudnn = OptionalKernel("cuDNN's attention", "scaled_dot_product_attention is used instead")


class Bias(Protocol):
    """A bias that is added to the attention logits."""

    @property
    def by_distance(self) -> bool:
        """Whether the bias depends only on the distance between query and key, so that no positions are needed."""

    @property
    def channels(self) -> int:
        """How many numbers are in memory for each query-key pair at the peak of `__call__`, for sizing blocks."""

    def __call__(self, position_BR: Tensor | None, distance_RC: Tensor) -> Tensor:
        """Returns [B or 1, H, R, C] for query positions [B or 1, R] and distances to keys (>= 0 where visible)."""

    def score_mod(self, position_Q: Tensor | None, device: torch.device) -> ScoreMod:
        """Returns the bias as a FlexAttention `score_mod`, from positions [Q] of all queries; finite for padding."""


def softmax_attention(
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
    """Computes causal softmax attention, [B, H, Q, D]; the queries are the last Q of the K positions.

    Args:
        q_BHQD: queries.
        k_BGKD: keys.
        v_BGKD: values.
        scale: factor of the logits.
        sliding_window: query j attends only to keys i with j - i < window; None means all earlier keys.
        seq_start_B: index of the first key that is not padding; queries before it attend only to themselves.
        bias: ALiBi or FIRE.
        position_ids_BQ: [B or 1, Q], the queries' positions in their texts, for a bias that depends on them; None
            counts from the first key.
    """
    heads = q_BHQD.shape[1]
    queries = q_BHQD.shape[2]
    keys = k_BGKD.shape[2]
    if sliding_window is None or sliding_window > keys:
        sliding_window = keys
    plain = sliding_window == keys and seq_start_B is None and bias is None
    if not (plain and q_BHQD.is_cuda and q_BHQD.dtype in (torch.float16, torch.bfloat16)):
        # only the flash kernels support grouped-query attention without falling back to O(L^2) memory
        k_BGKD, v_BGKD = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k_BGKD, v_BGKD))
    if plain and queries in (1, keys):
        if (long_BHQD := long_causal_attention(q_BHQD, k_BGKD, v_BGKD, scale=scale)) is not None:
            return long_BHQD
        return scaled_dot_product_attention(
            q_BHQD, k_BGKD, v_BGKD, is_causal=queries == keys > 1, scale=scale, enable_gqa=heads != k_BGKD.shape[1]
        )
    texts = 0 if position_ids_BQ is None else len(position_ids_BQ)
    by_distance = seq_start_B is None and (bias is None or bias.by_distance)
    learned = bias.parameters() if isinstance(bias, nn.Module) else ()
    if (by_distance or (seq_start_B is None and texts == 1)) and suits_flex(q_BHQD, k_BGKD, v_BGKD, *learned):
        position_Q = None if position_ids_BQ is None else position_ids_BQ[0]
        score_mod = None if bias is None else bias.score_mod(position_Q, q_BHQD.device)
        output_BHQD = compiled_flex_attention(
            q_BHQD, k_BGKD, v_BGKD, scale=scale, sliding_window=sliding_window, score_mod=score_mod
        )
        if output_BHQD is not None:
            return output_BHQD
    k_BHKD, v_BHKD = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k_BGKD, v_BGKD))
    per_row = seq_start_B is not None or (not by_distance and texts > 1)
    layers = (q_BHQD.shape[0] if per_row else 1) * (1 if bias is None else bias.channels)
    rows = rows_of_a_block(queries, keys, sliding_window, _mask_elements(q_BHQD.device) // layers)

    def mask(last: int, rows: int, columns: int, position_BR: Tensor | None) -> Tensor:
        """Returns [B or 1, H or 1, rows, columns] for the rows that end before key `last`, in the queries' dtype."""
        row_R = torch.arange(last - rows, last, device=q_BHQD.device)
        # each row is padded with (masked) newer keys, so that the next row begins at an address that kernels can read
        key_C = torch.arange(last - columns, last - columns + _aligned(columns), device=q_BHQD.device)
        distance_RC = row_R[:, None] - key_C
        seen = ((distance_RC >= 0) & (distance_RC < sliding_window))[None, None]
        if seq_start_B is not None:
            seen = seen & ((key_C >= seq_start_B[:, None, None, None]) | (distance_RC == 0))
        if bias is None:
            added = torch.zeros(1, dtype=q_BHQD.dtype, device=q_BHQD.device).expand(seen.shape)
        else:
            added = bias(row_R[None] if position_BR is None else position_BR, distance_RC).to(q_BHQD.dtype)
        return added.masked_fill(~seen, -torch.inf)[..., :columns]

    def block(last: int, columns: int, q_BHRD: Tensor, k: Tensor, v: Tensor, position_BR: Tensor | None) -> Tensor:
        return _masked_attention(q_BHRD, k, v, last, mask(last, q_BHRD.shape[2], columns, position_BR), scale)

    widest = min(keys, _aligned(rows + sliding_window - 1))
    shared = mask(keys, min(rows, queries), widest, None) if by_distance else None
    outputs = []
    # the first block is the shorter one, so that all others start at multiples of `rows` from the newest key
    for stop in range((queries - 1) % rows + 1, queries + 1, rows):
        start = max(0, stop - rows)
        last = keys - queries + stop
        columns = min(last, _aligned(stop - start + sliding_window - 1))
        q_BHRD = q_BHQD[:, :, start:stop]
        if shared is not None:
            block_mask = aligned_mask(shared[:, :, start - stop :, widest - columns :])
            outputs.append(_masked_attention(q_BHRD, k_BHKD, v_BHKD, last, block_mask, scale))
            continue
        position_BR = None if position_ids_BQ is None else position_ids_BQ[:, start:stop]
        arguments = (last, columns, q_BHRD, k_BHKD, v_BHKD, position_BR)
        if torch.is_grad_enabled() and rows < queries:
            outputs.append(checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(block(*arguments))
    return torch.cat(outputs, dim=2)


def long_causal_attention(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, *, scale: float) -> Tensor | None:
    """Computes plain causal attention of a long text by FlexAttention or chunked cuDNN attention, [B, H, L, D].

    Returns None if `scaled_dot_product_attention` is faster, or is the only way, as for values with another head_dim
    than the keys.
    """
    if suits_long_flex(q_BHLD, k_BGLD, v_BGLD):
        return long_flex_attention(q_BHLD, k_BGLD, v_BGLD, scale=scale)
    length, head_dim = q_BHLD.shape[2:]
    heads = q_BHLD, k_BGLD, v_BGLD
    chunks = -(-2 * length * head_dim * k_BGLD.element_size() // CACHED_BYTES)
    if chunks == 1 or torch.compiler.is_compiling():
        return None
    same_shapes = k_BGLD.shape == v_BGLD.shape and k_BGLD.shape[2:] == (length, head_dim)
    sixteen_bits = {x.dtype for x in heads} in ({torch.float16}, {torch.bfloat16})
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in heads)
    if needs_grad or not (same_shapes and sixteen_bits and is_hopper(q_BHLD)):
        return None
    chunk_tokens = _aligned(-(-length // chunks))
    return _chunked_cudnn.attempt(lambda: chunked_causal_attention(*heads, scale=scale, chunk_tokens=chunk_tokens))


def cudnn_attention(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Returns the attention output [B, H, Q, D] and the log-sum-exp of each query's logits, [B, H, Q] in fp32."""
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    output_BHQD, log_sum = attention(q_BHQD, k_BGKD, v_BGKD, None, True, 0.0, causal, scale=scale)[:2]
    return output_BHQD, log_sum.reshape(output_BHQD.shape[:3])


def chunked_causal_attention(
    q_BHLD: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    *,
    scale: float,
    chunk_tokens: int,
    attend: Callable[..., tuple[Tensor, Tensor]] = cudnn_attention,
) -> Tensor:
    """Computes plain causal attention in chunks of keys, merged by their log-sum-exps, [B, H, L, D].

    Args:
        q_BHLD: queries.
        k_BGLD: keys.
        v_BGLD: values.
        scale: factor of the logits.
        chunk_tokens: keys of a chunk, and queries of a block.
        attend: computes attention to one chunk, with the signature of `cudnn_attention`.
    """
    output_BHLD = torch.empty_like(q_BHLD)
    chunks = [slice(begin, begin + chunk_tokens) for begin in range(0, q_BHLD.shape[2], chunk_tokens)]
    for index, rows in enumerate(chunks):
        q_BHRD = q_BHLD[:, :, rows]
        mean_BHRD, log_sum_BHR = attend(q_BHRD, k_BGLD[:, :, rows], v_BGLD[:, :, rows], scale, True)
        for earlier in chunks[:index]:
            chunk_BHRD, chunk_log_sum_BHR = attend(q_BHRD, k_BGLD[:, :, earlier], v_BGLD[:, :, earlier], scale, False)
            share_BHR1 = torch.sigmoid(chunk_log_sum_BHR - log_sum_BHR)[..., None]
            # in fp32, since in 16 bits every merge would round
            mean_BHRD = mean_BHRD.to(share_BHR1.dtype).lerp_(chunk_BHRD.to(share_BHR1.dtype), share_BHR1)
            log_sum_BHR = torch.logaddexp(log_sum_BHR, chunk_log_sum_BHR)
        output_BHLD[:, :, rows] = mean_BHRD
    return output_BHLD


def aligned_mask(mask: Tensor) -> Tensor:
    """Returns the mask [..., rows, columns], copied if necessary so that all rows begin at multiples of 16 bytes.

    PyTorch's memory-efficient kernel requires this alignment, but checks only the strides, not the storage offset.
    """
    steps = (mask.storage_offset(), *mask.stride()[:-1])
    if mask.stride(-1) == 1 and not any(step * mask.itemsize % _MASK_BYTES for step in steps):
        return mask
    columns = mask.shape[-1]
    return pad(mask, (0, _aligned(columns) - columns)).contiguous()[..., :columns]


def _masked_attention(q_BHRD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, last: int, mask: Tensor, scale: float) -> Tensor:
    """Computes attention to the keys just before index `last`, as many as the mask has columns.

    cuDNN is excluded on a GPU, since it builds a plan for every new number of keys.
    """
    k_BHCD, v_BHCD = (x[:, :, last - mask.shape[-1] : last] for x in (k_BHKD, v_BHKD))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if q_BHRD.is_cuda else nullcontext():
        return scaled_dot_product_attention(q_BHRD, k_BHCD, v_BHCD, attn_mask=mask, scale=scale)


def rows_of_a_block(queries: int, keys: int, sliding_window: int, elements: int) -> int:
    """Returns how many rows a block may have so that a mask [rows, visible keys] has at most that many elements."""
    rows = elements // keys
    if sliding_window < keys:
        # a block has rows * (rows + window) elements; with more rows than the window, most of them would be masked
        rows = max(rows, min(sliding_window, elements // (2 * sliding_window)))
    rows = max(1, min(rows, queries))
    return rows - rows % _MULTIPLE if rows > _MULTIPLE else rows


def _mask_elements(device: torch.device) -> int:
    elements = MASK_ELEMENTS.get(device.type, MASK_ELEMENTS["cpu"])
    return elements if torch.is_grad_enabled() else elements * _MORE_WITHOUT_GRADIENTS.get(device.type, 1)


def _aligned(columns: int) -> int:
    """Rounds up to a multiple of 16, so that slices of a mask are aligned for PyTorch's kernels without a copy."""
    return -(-columns // _MULTIPLE) * _MULTIPLE
