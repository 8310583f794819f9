"""One new position a text, against keys in slots: room of a fixed size, with the lengths in the device's memory.

Shape suffixes: B slots, H query heads, G key/value heads, K room for keys, D head_dim.
"""

import contextlib
import math

import torch
from torch import Tensor

from sbeval.attention.api import Implementation, StickBreakingOutput, stickbreaking_attention


def stickbreaking_decode(
    q_BH1D: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    length_B: Tensor,
    *,
    scale: float,
    attend_current: bool = False,
    skip_threshold: float | None = None,
    impl: Implementation = "auto",
) -> StickBreakingOutput:
    """Stick-breaking attention of each slot's newest position, without a gradient.

    On a GPU nothing is read back from the device, so that a CUDA graph can record the call and replay it as texts grow.

    Args:
        q_BH1D: queries, one a slot.
        k_BGKD: room for keys, the query's own position being the last of `length_B`; the rest is not looked at, and
            must be finite.
        v_BGKD: likewise.
        length_B: integers, at least 1.
        scale: factor of the logits.
        attend_current: whether a query attends its own position.
        skip_threshold: as in `stickbreaking_attention`.
        impl: as there; "auto" takes kernels on a GPU and the definition elsewhere.

    Returns:
        `StickBreakingOutput`: output [B, H, 1, D] and remainder [B, H, 1].
    """
    if impl == "triton" or (impl == "auto" and q_BH1D.is_cuda and q_BH1D.dtype != torch.float64):
        from sbeval.attention.impl.triton.decode_slots import decode_slots
        from sbeval.attention.impl.triton.function import LOG2_NOTHING_LEFT

        log2_threshold = LOG2_NOTHING_LEFT if skip_threshold is None else math.log2(skip_threshold)
        q_BHD, k_BGKD, v_BGKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BH1D[:, :, 0], k_BGKD, v_BGKD))
        with torch.cuda.device(q_BHD.device) if q_BHD.is_cuda else contextlib.nullcontext():
            output_BHD, remainder_BH = decode_slots(
                q_BHD, k_BGKD, v_BGKD, length_B, scale, attend_current, log2_threshold
            )
        return StickBreakingOutput(output_BHD[:, :, None], remainder_BH[:, :, None])
    k_BGKD, v_BGKD, start_B = newest_last(k_BGKD, v_BGKD, length_B)
    return stickbreaking_attention(
        q_BH1D,
        k_BGKD,
        v_BGKD,
        scale=scale,
        attend_current=attend_current,
        seq_start=start_B,
        skip_threshold=skip_threshold,
        impl=impl,
    )


def newest_last(k_BGKD: Tensor, v_BGKD: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns keys and values padded on the left to the longest slot's length, and where each text begins in them."""
    shortest, longest = map(int, length_B.aminmax())
    start_B = longest - length_B
    if shortest == longest:
        return k_BGKD[:, :, :longest], v_BGKD[:, :, :longest], start_B
    place_BK = (torch.arange(longest, device=length_B.device) - start_B[:, None]).clamp_min(0)
    place_BGKD = place_BK[:, None, :, None].long().expand(-1, k_BGKD.shape[1], -1, k_BGKD.shape[3])
    return k_BGKD.gather(2, place_BGKD), v_BGKD.gather(2, place_BGKD), start_B
