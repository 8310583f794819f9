"""FlexAttention on a GPU: for attention with a bias or a sliding window, and for long texts with small heads.

ALiBi, FIRE, forget gates and sliding windows run in FlexAttention, whose kernel computes the bias of each logit itself,
so no [L, L] tensor is materialised. If FlexAttention does not compile, a warning is logged once, and the module
`softmax` computes attention in blocks of rows, each with its bias. Texts are padded to a multiple of the block size, so
that the kernel needs no bounds checks.

Plain causal attention with head_dim <= `TUNED_HEAD_DIM` uses FlexAttention for long texts too, since cuDNN's attention
pads such heads to 64.

Shape suffixes: B batch, H query heads, G key/value heads, L positions, D head_dim, Q queries.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad

from sbeval.models.kernels.devices import OptionalKernel, is_hopper

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes a logit and its batch, head, query and key index, and returns the logit with its bias."""

SHORTEST = 1024
"""Shortest text, in tokens, for which FlexAttention is used: below, compilation costs more time than it saves."""
LONG_TOKENS = 32768
"""Smallest number of tokens for which plain causal attention with small heads (`is_tuned`) uses FlexAttention.

Milliseconds of cuDNN and FlexAttention on an H200 with head_dim 32 (32 heads; 16 at 65536 tokens): 0.25 and 0.39 at
4096 tokens, 2.49 and 2.57 at 16384, 9.20 and 8.86 at 32768, 18.3 and 17.3 at 65536. Compilation takes seconds in
addition.
"""
TUNED_HEAD_DIM = 32
"""Largest head_dim for which the kernel's tile sizes were tuned."""

BLOCKS_OF_ROWS = "attention is computed in blocks of rows instead"
BLOCK_TOKENS = 128
_SMALLEST_HEAD_DIM, _LARGEST_HEAD_DIM = 16, 256
_RECOMPILE_LIMIT = 1024
"""Limit on recompilations in one process; each dtype, head_dim, number of heads, bias and window needs one.

Dynamo's own limit is eight.
"""


def whole_blocks(length: int) -> int:
    """Returns the length rounded up to a multiple of the block size, for which the kernel needs no bounds checks."""
    return -(-length // BLOCK_TOKENS) * BLOCK_TOKENS


def listed_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Converts a bool matrix of blocks to the sparse form that `BlockMask` takes.

    Args:
        chosen: bool [rows of blocks, columns of blocks].

    Returns:
        Number of chosen blocks of each row, [1, 1, rows], and column indices with the chosen ones first,
        [1, 1, rows, columns]; both int32.
    """
    count = chosen.sum(-1, dtype=torch.int32)
    first = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    # no views: guards on the base tensors of views would cause recompilations
    return count[None, None].detach(), first.to(torch.int32)[None, None].contiguous().detach()


def causal_blocks(length: int, sliding_window: int, device: torch.device) -> BlockMask:
    """Returns the mask, in blocks of 128 x 128, of causal attention with a sliding window: 0 <= j - i < window."""
    index = torch.arange(-(-length // BLOCK_TOKENS), device=device)
    apart = (index[:, None] - index).clamp_min(-1)  # distance in blocks, -1 if the keys are newer
    nearest, farthest = (apart * BLOCK_TOKENS + sign * (BLOCK_TOKENS - 1) for sign in (-1, 1))
    full = (apart >= 0) & (nearest >= 0) & (farthest < sliding_window)
    partial = (apart >= 0) & (nearest < sliding_window) & ~full

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < sliding_window)

    return mask_of_blocks(length, seen, listed_blocks(partial), listed_blocks(full))


def mask_of_blocks(
    length: int, seen: Callable[..., Tensor], partial: tuple[Tensor, Tensor], full: tuple[Tensor, Tensor]
) -> BlockMask:
    """Returns a `BlockMask` from partially and fully visible blocks (`listed_blocks`) and a `mask_mod` of pairs."""
    lengths = (length, length)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK_TOKENS, mask_mod=seen, seq_lengths=lengths)


def flex_causal_attention(
    q_BHLD: Tensor,
    k_BGLD: Tensor,
    v_BGLD: Tensor,
    *,
    scale: float,
    sliding_window: int,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None = None,
    attention: Callable[..., Any] | None = None,
) -> Tensor:
    """Computes causal attention over keys with j - i < `sliding_window`, [B, H, L, D].

    Args:
        q_BHLD: queries.
        k_BGLD: keys.
        v_BGLD: values.
        scale: factor of the logits.
        sliding_window: number of newest keys that a query sees.
        score_mod: bias for `whole_blocks(L)` positions, or None.
        block_mask: visible blocks for `whole_blocks(L)` positions; None means `causal_blocks`.
        attention: compiled `flex_with_options`; None runs it uncompiled, which materialises all pairs.
    """
    length, added = q_BHLD.shape[2], whole_blocks(q_BHLD.shape[2]) - q_BHLD.shape[2]
    if added:  # the padding is newer than all real queries, so the causal mask hides it
        q_BHLD, k_BGLD, v_BGLD = (_padded(x, added) for x in (q_BHLD, k_BGLD, v_BGLD))
    windowed = sliding_window < length
    if block_mask is None:
        block_mask = _blocks(length + added, sliding_window if windowed else length + added, q_BHLD.device)
    options: dict[str, Any] = {
        "score_mod": score_mod,
        "block_mask": block_mask,
        "scale": scale,
        "enable_gqa": q_BHLD.shape[1] != k_BGLD.shape[1],
        "tuned": is_tuned(q_BHLD),
        "windowed": windowed,
    }
    output: Tensor = (attention or flex_with_options)(q_BHLD, k_BGLD, v_BGLD, **options)
    return output[:, :, :length]


def _padded(x_BHLD: Tensor, added: int) -> Tensor:
    """Pads to [B, H, L + added, D], keeping x's memory layout: another layout would cause a recompilation."""
    if x_BHLD.stride(2) >= x_BHLD.stride(1):
        return pad(x_BHLD.transpose(1, 2), (0, 0, 0, 0, 0, added)).transpose(1, 2)
    return pad(x_BHLD, (0, 0, 0, added))


def flex_with_options(*heads: Tensor, tuned: bool, windowed: bool, **arguments: Any) -> Tensor:
    """Runs FlexAttention with kernel options for a length that is a multiple of the block size.

    `windowed` says that there is a sliding window. The options are literals here because `torch.compile` with dynamic
    shapes would treat numbers that are passed in as variables.
    """
    options: Any = {"IS_DIVISIBLE": True}  # compilation cannot derive these options from a dynamic length
    if tuned:
        # no PRESCALE_QK: it rounds the scaled queries, and a bias would be added to base-2 logits
        options.update({"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3})
        if not windowed:
            # with a window, a row may see no key of its first tile, and partial blocks are not contiguous
            options.update({"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True})
    output: Tensor = flex_attention(*heads, **arguments, kernel_options=options)  # type: ignore[call-overload]
    return output


_blocks = functools.lru_cache(maxsize=2)(causal_blocks)


@functools.cache
def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function for dynamic lengths; `fullgraph`, since a fallback to eager would materialise all pairs."""
    return torch.compile(function, dynamic=True, fullgraph=True)


class CompiledFlexAttention(OptionalKernel):
    """`flex_causal_attention`, compiled at its first call; after a failure, a warning says what runs `instead`."""

    def __init__(self, compiled: Callable[..., Any] | None = None, instead: str = BLOCKS_OF_ROWS) -> None:
        super().__init__("PyTorch's FlexAttention", instead)
        self._compiled = compiled

    def __call__(self, q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, **options: Any) -> Tensor | None:
        """Calls `flex_causal_attention` with these arguments; returns None if it cannot be compiled."""
        compiled = self._compiled or compiled_once(flex_with_options)

        def attention(*heads: Tensor, **options: Any) -> Any:
            # dynamo guards on the base of a view (a cache, a projection, a padded copy) and would compile for each
            # base; a detached tensor has no base
            return compiled(*(x if x.requires_grad else x.detach() for x in heads), **options)

        def run() -> Tensor:
            # dynamo counts recompilations for the code object, so compiling the function again would not reset them
            with torch._dynamo.config.patch(
                recompile_limit=_RECOMPILE_LIMIT, accumulated_recompile_limit=_RECOMPILE_LIMIT
            ):
                return flex_causal_attention(q_BHLD, k_BGLD, v_BGLD, **options, attention=attention)

        return self.attempt(run)


compiled_flex_attention = CompiledFlexAttention()
_plain_flex_attention = CompiledFlexAttention(instead="scaled_dot_product_attention is used instead")


def long_flex_attention(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, *, scale: float) -> Tensor | None:
    """Computes plain causal attention, [B, H, L, D]; returns None if FlexAttention cannot be compiled."""
    return _plain_flex_attention(q_BHLD, k_BHLD, v_BHLD, scale=scale, sliding_window=q_BHLD.shape[2], score_mod=None)


def suits_long_flex(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor) -> bool:
    """Whether FlexAttention is faster than `scaled_dot_product_attention` for this plain causal attention."""
    same = q_BHLD.shape == k_BHLD.shape == v_BHLD.shape and q_BHLD.dtype == k_BHLD.dtype == v_BHLD.dtype
    return same and q_BHLD.shape[2] >= LONG_TOKENS and suits_flex(q_BHLD, k_BHLD, v_BHLD) and is_tuned(q_BHLD)


def is_tuned(q_BHLD: Tensor) -> bool:
    """Whether FlexAttention's tile sizes were tuned for this dtype, head_dim and GPU."""
    sixteen_bits = q_BHLD.dtype in (torch.float16, torch.bfloat16)
    return sixteen_bits and _SMALLEST_HEAD_DIM <= q_BHLD.shape[3] <= TUNED_HEAD_DIM and is_hopper(q_BHLD)


def suits_flex(q_BHQD: Tensor, k_BGKD: Tensor, *values_and_parameters: Tensor) -> bool:
    """Whether FlexAttention is used: on a GPU, for a prefill of at least `SHORTEST` tokens, without gradients.

    `values_and_parameters` are the values and the parameters of a bias; none of them may need a gradient.
    """
    queries, keys, head_dim = q_BHQD.shape[2], k_BGKD.shape[2], q_BHQD.shape[3]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BHQD, k_BGKD, *values_and_parameters))
    fits = q_BHQD.dtype != torch.float64 and _SMALLEST_HEAD_DIM <= head_dim <= _LARGEST_HEAD_DIM
    tracing = torch.compiler.is_compiling()
    return q_BHQD.is_cuda and not needs_grad and fits and not tracing and queries == keys >= SHORTEST
