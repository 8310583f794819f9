"""Attention of the newest positions of texts to keys in slots of fixed size, with lengths in the device's memory.

Shape suffixes: B slots, H query heads, G key/value heads, Q newest positions, K room for keys, D head_dim.
"""

import contextlib
import math

import torch
from torch import Tensor

from sbeval.attention.api import Implementation, StickBreakingOutput, stickbreaking_attention


def stickbreaking_decode(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    length_B: Tensor,
    *,
    scale: float,
    attend_current: bool = False,
    skip_threshold: float | None = None,
    impl: Implementation = "auto",
) -> StickBreakingOutput:
    """Stick-breaking attention of each slot's newest positions, without a gradient.

    On a GPU nothing is read back from the device, so a CUDA graph can record the call and replay it as texts grow.

    Args:
        q_BHQD: queries, few in each slot.
        k_BGKD: room for keys; the first `length_B` are attended to, the last Q of which are the queries' positions.
            The rest must be finite.
        v_BGKD: room for values, likewise.
        length_B: integers, at least Q.
        scale: factor of the logits.
        attend_current: as in `stickbreaking_attention`, like the next two.
        skip_threshold: stick below which older keys are skipped.
        impl: "auto" takes kernels on a GPU and the definition on other devices.
    """
    if impl == "triton" or (impl == "auto" and q_BHQD.is_cuda and q_BHQD.dtype != torch.float64):
        from sbeval.attention.impl.triton.decode_slots import decode_slots
        from sbeval.attention.impl.triton.function import LOG2_NOTHING_LEFT

        log2_threshold = LOG2_NOTHING_LEFT if skip_threshold is None else math.log2(skip_threshold)
        q_BHQD, k_BGKD, v_BGKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHQD, k_BGKD, v_BGKD))
        with torch.cuda.device(q_BHQD.device) if q_BHQD.is_cuda else contextlib.nullcontext():
            arguments = (q_BHQD, k_BGKD, v_BGKD, length_B, scale, attend_current, log2_threshold)
            return StickBreakingOutput(*decode_slots(*arguments, skipping=skip_threshold is not None))
    k_BGKD, v_BGKD, start_B = newest_last(k_BGKD, v_BGKD, length_B)
    return stickbreaking_attention(
        q_BHQD,
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
