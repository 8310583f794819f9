"""PyTorch's FlexAttention: for a bias or a window, which its kernel computes itself, and for long texts of small heads.

A bias never lies in memory. Heads of at most `TUNED_HEAD_DIM` are taken without bias or window too, since cuDNN's
attention pads them to 64.

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
"""From a logit, batch, head, query and key index to the logit with its bias."""

SHORTEST = 1024
"""Shorter texts fit a few blocks of rows of PyTorch's other kernels, and are not worth compiling for."""
LONG_TOKENS = 32768
"""Plain causal attention of texts as long is faster here than elsewhere in PyTorch, where the tiles are tuned.

Measured on an H200 (16 heads of 32 in 64K, else 32): cuDNN takes 0.25 ms at 4096 tokens and this 0.39, 2.49 and 2.57 at
16384, 9.20 and 8.86 at 32768, 18.3 and 17.3 at 65536. A kernel takes seconds to compile besides.
"""
TUNED_HEAD_DIM = 32
"""Largest size of a head for which the kernel's tiles were tuned."""

BLOCKS_OF_ROWS = "going on with blocks of rows"
BLOCK_TOKENS = 128
_SMALLEST_HEAD_DIM, _LARGEST_HEAD_DIM = 16, 256
_MOST_KINDS = 1024
"""Kernels compiled in one process: of dtypes, head sizes and counts, biases, windows. Dynamo gives up after eight."""


def whole_blocks(length: int) -> int:
    """Returns the length rounded up to whole blocks, which the kernel reads without a look at where a text ends."""
    return -(-length // BLOCK_TOKENS) * BLOCK_TOKENS


def listed_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """From bool [rows of blocks, columns of blocks] to how many each row has and which, as `BlockMask` takes them."""
    count = chosen.sum(-1, dtype=torch.int32)
    first = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    # no views: what they are views of would have to be alike for a kernel to be used again
    return count[None, None].detach(), first.to(torch.int32)[None, None].contiguous().detach()


def causal_blocks(length: int, sliding_window: int, device: torch.device) -> BlockMask:
    """Which blocks of 128 x 128 pairs are seen in full, in part, or not: keys with 0 <= j - i < window."""
    index = torch.arange(-(-length // BLOCK_TOKENS), device=device)
    apart = (index[:, None] - index).clamp_min(-1)  # distances between blocks, -1 where the keys are newer
    nearest, farthest = (apart * BLOCK_TOKENS + sign * (BLOCK_TOKENS - 1) for sign in (-1, 1))
    full = (apart >= 0) & (nearest >= 0) & (farthest < sliding_window)
    partial = (apart >= 0) & (nearest < sliding_window) & ~full

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < sliding_window)

    return mask_of_blocks(length, seen, listed_blocks(partial), listed_blocks(full))


def mask_of_blocks(
    length: int, seen: Callable[..., Tensor], partial: tuple[Tensor, Tensor], full: tuple[Tensor, Tensor]
) -> BlockMask:
    """Returns a mask from blocks seen in part and in full, as `listed_blocks` has them, and the pairs that are seen."""
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
    """Returns [B, H, L, D] of causal attention over keys with j - i < `sliding_window`.

    `score_mod` and `block_mask`, for which None stands for `causal_blocks`, are of `whole_blocks(L)` positions;
    `attention` is `flex_with_options` compiled, None takes it as it is, which holds all pairs.
    """
    length = q_BHLD.shape[2]
    added = whole_blocks(q_BHLD.shape[2]) - q_BHLD.shape[2]
    if added:  # newer than every query whose output is kept
        q_BHLD, k_BGLD, v_BGLD = (_padded(x, added) for x in (q_BHLD, k_BGLD, v_BGLD))
    windowed = sliding_window < length
    if block_mask is None:
        block_mask = _blocks(length + added, sliding_window if windowed else length + added, q_BHLD.device)
    grouped = q_BHLD.shape[1] != k_BGLD.shape[1]
    options: dict[str, Any] = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale, "enable_gqa": grouped}
    options |= {"tuned": is_tuned(q_BHLD), "windowed": windowed}
    output: Tensor = (attention or flex_with_options)(q_BHLD, k_BGLD, v_BGLD, **options)
    return output[:, :, :length]


def _padded(x_BHLD: Tensor, added: int) -> Tensor:
    """Returns [B, H, L + added, D] in the order of x's memory: for another order, a kernel would be compiled anew."""
    if x_BHLD.stride(2) >= x_BHLD.stride(1):
        return pad(x_BHLD.transpose(1, 2), (0, 0, 0, 0, 0, added)).transpose(1, 2)
    return pad(x_BHLD, (0, 0, 0, added))


def flex_with_options(*heads: Tensor, tuned: bool, windowed: bool, **others: Any) -> Tensor:
    """FlexAttention, of a length of whole blocks; `windowed` puts older keys out of sight.

    The options stand here as literals, since the compiler expects numbers that it is handed to change.
    """
    options: Any = {"IS_DIVISIBLE": True}  # which it cannot find out for a length of any number
    if tuned:
        # no PRESCALE_QK: it rounds the scaled queries, and a bias would be added to logits of base 2
        options.update({"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3})
        if not windowed:
            # with a window, a row may see no key of its first tile, and blocks that are seen in part lie apart
            options.update({"ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True})
    output: Tensor = flex_attention(*heads, **others, kernel_options=options)  # type: ignore[call-overload]
    return output


_blocks = functools.lru_cache(maxsize=2)(causal_blocks)


@functools.cache
def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns one kernel for all lengths; `fullgraph` because what is run uncompiled holds all pairs."""
    return torch.compile(function, dynamic=True, fullgraph=True)


class CompiledFlexAttention(OptionalKernel):
    """`flex_causal_attention`, compiled at its first call; `instead` says what is done where that fails."""

    def __init__(self, compiled: Callable[..., Any] | None = None, instead: str = BLOCKS_OF_ROWS) -> None:
        super().__init__("PyTorch's FlexAttention", instead)
        self._compiled = compiled

    def __call__(self, q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, **options: Any) -> Tensor | None:
        """Takes what `flex_causal_attention` takes; returns [B, H, L, D], or None where it cannot be compiled."""
        compiled = self._compiled or compiled_once(flex_with_options)

        def attention(*heads: Tensor, **options: Any) -> Any:
            # views are compiled for what they are views of: a cache, a projection, a padded copy, one kernel each
            return compiled(*(x if x.requires_grad else x.detach() for x in heads), **options)

        def run() -> Tensor:
            # the count is of the code, whoever compiled it, so a second compiled function would not start anew
            with torch._dynamo.config.patch(recompile_limit=_MOST_KINDS, accumulated_recompile_limit=_MOST_KINDS):
                return flex_causal_attention(q_BHLD, k_BGLD, v_BGLD, **options, attention=attention)

        return self.attempt(run)


compiled_flex_attention = CompiledFlexAttention()
_plain_flex_attention = CompiledFlexAttention(instead="going on with its scaled_dot_product_attention")


def long_flex_attention(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, *, scale: float) -> Tensor | None:
    """Returns [B, H, L, D] of plain causal attention to all keys, or None where it cannot be compiled."""
    return _plain_flex_attention(q_BHLD, k_BHLD, v_BHLD, scale=scale, sliding_window=q_BHLD.shape[2], score_mod=None)


def suits_long_flex(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor) -> bool:
    """Whether FlexAttention is the faster one for plain causal attention, which PyTorch has other kernels for."""
    same = q_BHLD.shape == k_BHLD.shape == v_BHLD.shape and q_BHLD.dtype == k_BHLD.dtype == v_BHLD.dtype
    return same and q_BHLD.shape[2] >= LONG_TOKENS and suits_flex(q_BHLD, k_BHLD, v_BHLD) and is_tuned(q_BHLD)


def is_tuned(q_BHLD: Tensor) -> bool:
    """Whether the tiles of FlexAttention's kernel were tuned for heads like these on a GPU like theirs."""
    sixteen_bits = q_BHLD.dtype in (torch.float16, torch.bfloat16)
    return sixteen_bits and _SMALLEST_HEAD_DIM <= q_BHLD.shape[3] <= TUNED_HEAD_DIM and is_hopper(q_BHLD)


def suits_flex(q_BHQD: Tensor, k_BGKD: Tensor, *others: Tensor) -> bool:
    """Whether FlexAttention is the faster one: on a GPU, for whole texts of some length, without gradients.

    `others` are what the result depends on besides: the values and the parameters of a bias.
    """
    queries = q_BHQD.shape[2]
    keys = k_BGKD.shape[2]
    head_dim = q_BHQD.shape[3]
    kept = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BHQD, k_BGKD, *others))
    fits = q_BHQD.dtype != torch.float64 and _SMALLEST_HEAD_DIM <= head_dim <= _LARGEST_HEAD_DIM
    tracing = torch.compiler.is_compiling()
    return q_BHQD.is_cuda and not kept and fits and not tracing and queries == keys >= SHORTEST
