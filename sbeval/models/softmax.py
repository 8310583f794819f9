"""Causal softmax attention of the baselines: PyTorch's own, over blocks of queries where a mask or bias is needed.

No [L, L] tensor is ever held. A mask or bias that depends on distance alone is made once, for one block of rows, and
every block takes its newest columns; any other is made for each block, and again in the backward pass. Where
FlexAttention is faster, neither is made at all. Keys and values that outgrow a GPU's cache are attended to piece by
piece.

Shape suffixes: B batch, H query heads, G key/value heads, Q queries, K keys, D head_dim, R rows of a block, C keys a
block can see.
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
"""Most elements of one block's mask or bias, by device: small enough for memory, large enough to keep it busy."""
_MORE_WITHOUT_GRADIENTS = {"cuda": 8}
"""How much larger blocks may be where nothing is kept for a backward pass: few rows leave a GPU idle."""
_MULTIPLE = 16
_MASK_BYTES = 16
CACHED_BYTES = 32 * 2**20
"""Keys and values of a head for which an H200's cache of 60 MB has room while cuDNN's kernel goes over them.

With head_dim 128 its rate falls from 588 TFLOP/s at 64K tokens to 556 at 128K and 524 at 256K, and in pieces is 590 and
600; with 256, from 592 and 561 at 64K and 128K to 618 and 630 (cuDNN 9.19, bf16).
"""
_in_pieces = OptionalKernel("cuDNN's attention", "going on with its scaled_dot_product_attention")


class Bias(Protocol):
    """What is added to the attention logits."""

    @property
    def by_distance(self) -> bool:
        """Whether the distance alone decides, so that positions are not needed."""

    @property
    def channels(self) -> int:
        """Most numbers held at once for each pair of query and key."""

    def __call__(self, position_BR: Tensor | None, distance_RC: Tensor) -> Tensor:
        """From positions [B or 1, R] of queries and distances to keys (>= 0 where seen) to [B or 1, H, R, C]."""

    def score_mod(self, position_Q: Tensor | None, device: torch.device) -> ScoreMod:
        """The same for FlexAttention, from positions [Q] of all queries, and finite for those that fill up a block."""


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
    """Returns [B, H, Q, D]; the queries are the last Q of the K positions.

    Query j sees keys i with j - i < `sliding_window`, all without one. `seq_start_B` is the first key that is no
    padding; rows before it see themselves alone. `position_ids_BQ`, [B or 1, Q], are the queries' positions in their
    texts, for a bias that depends on them; None counts from the first key.
    """
    heads = q_BHQD.shape[1]
    queries = q_BHQD.shape[2]
    keys = k_BGKD.shape[2]
    if sliding_window is None or sliding_window > keys:
        sliding_window = keys
    plain = sliding_window == keys and seq_start_B is None and bias is None
    if not (plain and q_BHQD.is_cuda and q_BHQD.dtype in (torch.float16, torch.bfloat16)):
        # only the flash kernels take grouped heads without falling back to O(L^2) memory
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
    rows = _rows_of_a_block(queries, keys, sliding_window, layers, q_BHQD.device)

    def mask(last: int, rows: int, columns: int, position_BR: Tensor | None) -> Tensor:
        """[B or 1, H or 1, rows, columns] for the rows that end before key `last`, in the queries' dtype."""
        row_R = torch.arange(last - rows, last, device=q_BHQD.device)
        # keys newer than all rows fill up each row, so that the next one begins where kernels can read it
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
    # the first block is the short one: the others then start at multiples of `rows` from the newest key
    for stop in range((queries - 1) % rows + 1, queries + 1, rows):
        start = max(0, stop - rows)
        last = keys - queries + stop
        columns = min(last, _aligned(stop - start + sliding_window - 1))
        q_BHRD = q_BHQD[:, :, start:stop]
        if shared is not None:
            shown = readable_mask(shared[:, :, start - stop :, widest - columns :])
            outputs.append(_masked_attention(q_BHRD, k_BHKD, v_BHKD, last, shown, scale))
            continue
        position_BR = None if position_ids_BQ is None else position_ids_BQ[:, start:stop]
        arguments = (last, columns, q_BHRD, k_BHKD, v_BHKD, position_BR)
        if torch.is_grad_enabled() and rows < queries:
            outputs.append(checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(block(*arguments))
    return torch.cat(outputs, dim=2)


def long_causal_attention(q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, *, scale: float) -> Tensor | None:
    """Returns [B, H, L, D] of plain causal attention, or None where `scaled_dot_product_attention` is the fastest way.

    Values of another shape than the keys are left to that.
    """
    if suits_long_flex(q_BHLD, k_BGLD, v_BGLD):
        return long_flex_attention(q_BHLD, k_BGLD, v_BGLD, scale=scale)
    length, head_dim = q_BHLD.shape[2:]
    heads = q_BHLD, k_BGLD, v_BGLD
    same = k_BGLD.shape == v_BGLD.shape and k_BGLD.shape[2:] == (length, head_dim)
    sixteen_bits = {x.dtype for x in heads} in ({torch.float16}, {torch.bfloat16})
    pieces = -(-2 * length * head_dim * k_BGLD.element_size() // CACHED_BYTES)
    kept = torch.is_grad_enabled() and any(x.requires_grad for x in heads)
    if pieces == 1 or not (same and sixteen_bits and is_hopper(q_BHLD)) or kept or torch.compiler.is_compiling():
        return None
    piece_tokens = _aligned(-(-length // pieces))
    return _in_pieces.attempt(lambda: causal_in_pieces(*heads, scale=scale, piece_tokens=piece_tokens))


def cudnn_attention(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Returns [B, H, Q, D] and the log of the sum of each query's weights, [B, H, Q] in fp32."""
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    output_BHQD, log_sum = attention(q_BHQD, k_BGKD, v_BGKD, None, True, 0.0, causal, scale=scale)[:2]
    return output_BHQD, log_sum.reshape(output_BHQD.shape[:3])


def causal_in_pieces(
    q_BHLD: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    *,
    scale: float,
    piece_tokens: int,
    attend: Callable[..., tuple[Tensor, Tensor]] = cudnn_attention,
) -> Tensor:
    """Returns [B, H, L, D] of plain causal attention: the mean of attention to each piece of the keys.

    A piece has the share that its weights have of all weights before they are normed. `attend` takes queries, keys,
    values, the scale and whether it is causal, and returns what `cudnn_attention` does.
    """
    output_BHLD = torch.empty_like(q_BHLD)
    pieces = [slice(begin, begin + piece_tokens) for begin in range(0, q_BHLD.shape[2], piece_tokens)]
    for place, rows in enumerate(pieces):
        q_BHRD = q_BHLD[:, :, rows]
        mean_BHRD, log_sum_BHR = attend(q_BHRD, k_BGLD[:, :, rows], v_BGLD[:, :, rows], scale, True)
        for earlier in pieces[:place]:
            more_BHRD, more_BHR = attend(q_BHRD, k_BGLD[:, :, earlier], v_BGLD[:, :, earlier], scale, False)
            share_BHR1 = torch.sigmoid(more_BHR - log_sum_BHR)[..., None]
            # not in 16 bits, of which every piece would round some away
            mean_BHRD = mean_BHRD.to(share_BHR1.dtype).lerp_(more_BHRD.to(share_BHR1.dtype), share_BHR1)
            log_sum_BHR = torch.logaddexp(log_sum_BHR, more_BHR)
        output_BHLD[:, :, rows] = mean_BHRD
    return output_BHLD


def readable_mask(mask: Tensor) -> Tensor:
    """Returns a mask [..., rows, columns] whose rows all begin at multiples of 16 bytes, copied where one does not.

    PyTorch's memory-efficient kernel reads them so, and looks at the strides alone, not at where the first row begins.
    """
    steps = (mask.storage_offset(), *mask.stride()[:-1])
    if mask.stride(-1) == 1 and not any(step * mask.itemsize % _MASK_BYTES for step in steps):
        return mask
    columns = mask.shape[-1]
    return pad(mask, (0, _aligned(columns) - columns)).contiguous()[..., :columns]


def _masked_attention(q_BHRD: Tensor, k_BHKD: Tensor, v_BHKD: Tensor, last: int, mask: Tensor, scale: float) -> Tensor:
    """PyTorch's attention to the keys before `last`, as many as the mask has columns.

    cuDNN, which plans anew for every number of keys, is left out on a GPU.
    """
    k_BHCD, v_BHCD = (x[:, :, last - mask.shape[-1] : last] for x in (k_BHKD, v_BHKD))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]) if q_BHRD.is_cuda else nullcontext():
        return scaled_dot_product_attention(q_BHRD, k_BHCD, v_BHCD, attn_mask=mask, scale=scale)


def _rows_of_a_block(queries: int, keys: int, sliding_window: int, layers: int, device: torch.device) -> int:
    """Rows whose mask, `layers` times [rows, keys seen], stays within the device's budget."""
    elements = MASK_ELEMENTS.get(device.type, MASK_ELEMENTS["cpu"])
    if not torch.is_grad_enabled():
        elements *= _MORE_WITHOUT_GRADIENTS.get(device.type, 1)
    budget = elements // layers
    rows = budget // keys
    if sliding_window < keys:
        # rows * (rows + window) elements; more rows than the window would mostly look at masked keys
        rows = max(rows, min(sliding_window, budget // (2 * sliding_window)))
    rows = max(1, min(rows, queries))
    return rows - rows % _MULTIPLE if rows > _MULTIPLE else rows


def _aligned(columns: int) -> int:
    """Rounded up, so that slices of a mask start where PyTorch's kernels can read them without a copy."""
    return -(-columns // _MULTIPLE) * _MULTIPLE
