"""FlexAttention for methods of several zones: one call a zone, put together by their log-sum-exps.

Shape suffixes: B batch, H query heads, G key/value heads, L positions, D head_dim, Q queries.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from sbeval.models.extrapolation.methods import Extrapolation, Zone
from sbeval.models.flex import listed_blocks, whole_blocks
from sbeval.models.kernels.optional import OptionalKernel

_BLOCK = 128
Rotated = Callable[[Zone], tuple[Tensor, Tensor]]
"""From a zone to the queries [B, H, L, D] and keys [B, G, L, D] rotated for it."""


def zone_blocks(first_Q: Tensor, stop_Q: Tensor) -> BlockMask:
    """Which blocks of 128 x 128 pairs hold keys from `first` to before `stop` of their queries, in full or in part.

    Args:
        first_Q: int32, of whole blocks of queries.
        stop_Q: likewise.
    """
    blocks = len(first_Q) // _BLOCK
    first, stop = first_Q.view(blocks, _BLOCK), stop_Q.view(blocks, _BLOCK)
    begin = torch.arange(blocks, device=first_Q.device) * _BLOCK
    full = (first.amax(1)[:, None] <= begin) & (stop.amin(1)[:, None] >= begin + _BLOCK)
    some = (first.amin(1)[:, None] < begin + _BLOCK) & (stop.amax(1)[:, None] > begin)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_Q[query]) & (key < stop_Q[query])

    length = len(first_Q)
    return BlockMask.from_kv_blocks(
        *listed_blocks(some & ~full),
        *listed_blocks(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=seen,
        seq_lengths=(length, length),
    )


@functools.lru_cache(maxsize=2)
def _blocks(method: Extrapolation, length: int, device: torch.device) -> tuple[BlockMask, ...]:
    position_Q = torch.arange(length, device=device)
    return tuple(zone_blocks(zone.first(position_Q).int(), zone.stop(position_Q).int()) for zone in method.zones)


def flex_with_sums(
    q_BHLD: Tensor, k_BGLD: Tensor, v_BGLD: Tensor, block_mask: BlockMask, scale: float, enable_gqa: bool
) -> tuple[Tensor, Tensor]:
    """FlexAttention of a length of whole blocks, with the log-sum-exp [B, H, L] of each query's logits."""
    options: Any = {"IS_DIVISIBLE": True}  # which it cannot find out for a length of any number
    output, others = flex_attention(
        q_BHLD,
        k_BGLD,
        v_BGLD,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=enable_gqa,
        kernel_options=options,
        return_aux=AuxRequest(lse=True),
    )
    assert others.lse is not None
    return output, others.lse


def flex_extrapolated(
    method: Extrapolation,
    rotated: Rotated,
    v_BGLD: Tensor,
    *,
    scale: float,
    attention: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Returns [B, H, L, D] of a whole text without padding.

    Args:
        method: which pairs are in which zone.
        rotated: gives queries and keys.
        v_BGLD: values.
        scale: factor of the logits.
        attention: `flex_with_sums` compiled; None takes it as it is, which holds all pairs.
    """
    length = v_BGLD.shape[2]
    added = whole_blocks(length) - length

    def filled(x_BHLD: Tensor) -> Tensor:
        # no views, and always in one order of memory: for any other, a kernel would be compiled anew
        return (pad(x_BHLD, (0, 0, 0, added)) if added else x_BHLD).contiguous().detach()

    v_BGLD = filled(v_BGLD)
    outputs, sums = [], []
    for zone, block_mask in zip(method.zones, _blocks(method, length + added, v_BGLD.device), strict=True):
        q_BHLD, k_BGLD = map(filled, rotated(zone))
        grouped = q_BHLD.shape[1] != k_BGLD.shape[1]
        output, sum_BHL = (attention or flex_with_sums)(q_BHLD, k_BGLD, v_BGLD, block_mask, scale, grouped)
        outputs.append(output[:, :, :length])
        sums.append(sum_BHL[:, :, :length].float())
    share_PBHL = torch.stack(sums).softmax(dim=0)
    # a query without keys in a zone has a share of 0 there
    mixed = sum(output * share[..., None] for output, share in zip(outputs, share_PBHL, strict=True))
    assert isinstance(mixed, Tensor)
    return mixed.to(v_BGLD.dtype)


class CompiledZones(OptionalKernel):
    """`flex_extrapolated` compiled at its first call."""

    def __init__(self) -> None:
        super().__init__("PyTorch's FlexAttention", "going on with blocks of rows")
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, method: Extrapolation, rotated: Rotated, v_BGLD: Tensor, *, scale: float) -> Tensor | None:
        """Takes what `flex_extrapolated` takes; returns [B, H, L, D], or None where it cannot be compiled."""
        if self._compiled is None:
            # one kernel for all lengths, methods and zones; what is run uncompiled holds all pairs
            self._compiled = torch.compile(flex_with_sums, dynamic=True, fullgraph=True)
        compiled = self._compiled
        return self.attempt(lambda: flex_extrapolated(method, rotated, v_BGLD, scale=scale, attention=compiled))


compiled_zones = CompiledZones()
