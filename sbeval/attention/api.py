"""The operation as callers see it: shapes and meaning are checked here once, then an implementation is chosen.

Shape suffixes: B batch, H query heads, G key/value heads, Q queries, K keys, D head_dim.
"""

import math
from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sbeval.attention.packed import check_cu_seqlens

Implementation = Literal["auto", "reference", "blockwise", "triton"]

AUTOCAST_DEVICES = ("cpu", "cuda")

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class StickBreakingOutput(NamedTuple):
    """What attention returns.

    Attributes:
        output: [B, H, Q, D] in the queries' dtype.
        remainder: [B, H, Q] in fp32 (fp64 for fp64 inputs): the part of each query's stick no key took.
    """

    output: Tensor
    remainder: Tensor


def stickbreaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    attend_current: bool = False,
    seq_start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    skip_threshold: float | None = None,
    causal: bool = True,
    newer_remainder: Tensor | None = None,
    impl: Implementation = "auto",
) -> StickBreakingOutput:
    """Stick-breaking attention (Tan et al. 2025, arXiv 2410.17980, equations 1 to 4).

    With z_ij = scale * q_j . k_i and beta_ij = sigmoid(z_ij), query j gives key i < j the weight
    A_ij = beta_ij * prod_{i<k<j} (1 - beta_kj): the newest key takes its share of the stick first. There are no
    position embeddings. The output is sum_i A_ij v_i and the remainder is 1 - sum_i A_ij.

    Args:
        q: [B, H, Q, D] queries. When Q < K they are the last Q positions. Any strides are fine, as for k and v.
        k: [B, G, K, D] keys; H is a multiple of G, and query head h uses key/value head h // (H // G).
        v: [B, G, K, D] values. As in other attention, a weight of 0 times infinity or NaN is NaN: rows that give a
            value no weight may see it through a tile they share with rows that do.
        scale: factor of the logits; None means D ** -0.5.
        attend_current: let a query attend its own position as well (i <= j instead of i < j).
        seq_start: [B] integers for left-padded batches: keys before position seq_start[b] get no weight, so rows before
            it have output 0 and remainder 1. None means 0 everywhere.
        cu_seqlens: int32 [n + 1] for n packed sequences, on the tensors' device: q is [1, H, T, D], k and v are
            [1, G, T, D], and sequence s is tokens cu_seqlens[s] up to cu_seqlens[s + 1], which see no other sequence.
            It rises from 0 to T; a sequence may be empty; where not `causal` it describes the queries alone. On CUDA,
            looking at its values costs one transfer to the host; they are not looked at while a CUDA graph is captured
            or torch.compile traces.
        cu_seqlens_k: int32 [n + 1], the same for keys that are all older: query sequence s sees key sequence s.
        skip_threshold: stop looking back once every query of a block has less than this much of its stick left. The
            output then changes by at most `skip_threshold * max|v|` and the remainder by at most `skip_threshold`.
            None visits every key that a stick above fp32's smallest normal number reaches.
        causal: whether queries are the last positions of the keys. False: every key is older than every query, of any
            number. Calls for blocks of keys, newest to oldest, combine to what one call for all of them returns:
            output o1 + r1 o2 + r1 r2 o3 + ..., remainder r1 r2 r3 ...
        newer_remainder: [B, H, Q] fp32 (fp64 for fp64 inputs), what newer blocks left of each stick, where not
            `causal`: a walk ends where its product with the stick is below the threshold. It changes nothing else,
            and has no gradient.
        impl: "reference" (O(L^2) memory, the definition), "blockwise" (plain PyTorch, O(L) memory, any device),
            "triton" (CUDA), or "auto": "triton" for CUDA tensors it supports, else "blockwise".

    Returns:
        `StickBreakingOutput(output, remainder)`, both differentiable once. torch.compile takes the call as one operator
        and CUDA graphs can record it (run it once before, so that the kernels are compiled). Gradients from "triton"
        differ in their last bits from run to run, unless `torch.use_deterministic_algorithms(True)` is set; the
        backward pass then computes every tile twice.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, Q > K, the implementation cannot run on these tensors, or a
            forward-mode derivative is asked for, which "reference" alone has.
    """
    check_inputs(q, k, v, seq_start, cu_seqlens, skip_threshold, cu_seqlens_k=cu_seqlens_k, causal=causal)
    if newer_remainder is not None:
        _check_newer(newer_remainder, q, causal)
        newer_remainder = newer_remainder.detach().contiguous()
    if scale is None:
        scale = float(q.shape[-1] ** -0.5)
    if impl == "auto":
        impl = "triton" if q.is_cuda and q.dtype != torch.float64 and q.shape[-1] <= 256 else "blockwise"
    if impl not in ("reference", "blockwise", "triton"):
        raise ValueError(f"impl must be auto, reference, blockwise or triton, got {impl!r}")
    if impl != "reference":
        _refuse_tangents(q, k, v)
    inputs = (q, k, v, scale, attend_current, seq_start, cu_seqlens)
    if impl == "triton":
        # only the implementation that is asked for: triton is not on every machine
        from sbeval.attention.impl.triton import triton_attention

        return StickBreakingOutput(*triton_attention(*inputs, skip_threshold, cu_seqlens_k, newer_remainder, causal))
    # autocast would round the logits to 16 bits
    with torch.autocast(q.device.type, enabled=False) if q.device.type in AUTOCAST_DEVICES else nullcontext():
        if impl == "reference":
            from sbeval.attention.impl.reference import reference  # as above

            return StickBreakingOutput(*reference(*inputs, cu_seqlens_k, causal))
        from sbeval.attention.impl.blockwise import blockwise  # as above

        return StickBreakingOutput(*blockwise(*inputs, skip_threshold, cu_seqlens_k, newer_remainder, causal))


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

    k and v are room for keys and values: the first `length_B` (integers, at least Q) are attended to, the last Q of
    which are the queries' positions; the rest must be finite. The other options are those of `stickbreaking_attention`;
    `impl` "auto" takes kernels on a GPU.
    """
    if impl == "triton" or (impl == "auto" and q_BHQD.is_cuda and q_BHQD.dtype != torch.float64):
        from sbeval.attention.impl.triton.decode_slots import decode_slots  # as above
        from sbeval.attention.impl.triton.function import LOG2_NOTHING_LEFT  # as above

        log2_threshold = LOG2_NOTHING_LEFT if skip_threshold is None else math.log2(skip_threshold)
        q_BHQD, k_BGKD, v_BGKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHQD, k_BGKD, v_BGKD))
        arguments = (q_BHQD, k_BGKD, v_BGKD, length_B, scale, attend_current, log2_threshold)
        return StickBreakingOutput(*decode_slots(*arguments, skipping=skip_threshold is not None))
    k_BGKD, v_BGKD, start_B = _newest_last(k_BGKD, v_BGKD, length_B)
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


def _newest_last(k_BGKD: Tensor, v_BGKD: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns keys and values padded on the left to the longest slot's length, and where each text begins in them."""
    shortest, longest = map(int, length_B.aminmax())
    start_B = longest - length_B
    if shortest == longest:
        return k_BGKD[:, :, :longest], v_BGKD[:, :, :longest], start_B
    place_BK = (torch.arange(longest, device=length_B.device) - start_B[:, None]).clamp_min(0)
    place_BGKD = place_BK[:, None, :, None].long().expand(-1, k_BGKD.shape[1], -1, k_BGKD.shape[3])
    return k_BGKD.gather(2, place_BGKD), v_BGKD.gather(2, place_BGKD), start_B


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_start: Tensor | None,
    cu_seqlens: Tensor | None,
    skip_threshold: float | None,
    *,
    cu_seqlens_k: Tensor | None = None,
    causal: bool = True,
) -> None:
    """Refuses inputs that do not fit each other with a ValueError; see `stickbreaking_attention`."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_dense(name, tensor)
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, length, head_dim], got shape {list(tensor.shape)}")
        if tensor.dtype not in _FLOATING:
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
        if tensor.dtype != q.dtype:
            raise ValueError(f"q, k and v must share one dtype, got {q.dtype} for q and {tensor.dtype} for {name}")
        if tensor.device != q.device:
            raise ValueError(f"q, k and v must share one device, got {q.device} for q and {tensor.device} for {name}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch and head_dim, got {list(q.shape)} and {list(k.shape)}")
    if q.shape[3] == 0:
        raise ValueError("head_dim must be at least 1, got 0")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {q.shape[1]} and {k.shape[1]}")
    if causal and q.shape[2] > k.shape[2]:
        raise ValueError(f"queries are the last positions of the keys: at most {k.shape[2]} fit, got {q.shape[2]}")
    if seq_start is not None:
        _check_dense("seq_start", seq_start)
        if seq_start.shape != q.shape[:1] or seq_start.dtype not in _INTEGERS:
            raise ValueError(f"seq_start must be {q.shape[0]} integers, got {seq_start.dtype} {list(seq_start.shape)}")
        if seq_start.device != q.device:
            raise ValueError(f"seq_start must be on {q.device} like q, got {seq_start.device}")
    if cu_seqlens is not None:
        if seq_start is not None:
            raise ValueError("cu_seqlens says where packed sequences begin: seq_start must be None beside it")
        _check_dense("cu_seqlens", cu_seqlens)
        if cu_seqlens_k is not None:
            _check_dense("cu_seqlens_k", cu_seqlens_k)
        elif not causal:
            raise ValueError("cu_seqlens describes queries where causal=False: give cu_seqlens_k for the keys")
        check_cu_seqlens(cu_seqlens, q, k, cu_seqlens_k)
    if cu_seqlens_k is not None and (causal or cu_seqlens is None):
        raise ValueError("cu_seqlens_k goes with cu_seqlens and causal=False: leave it out, or give both")
    if skip_threshold is not None and not 0 < skip_threshold < 1:
        raise ValueError(f"skip_threshold must lie between 0 and 1, or be None, got {skip_threshold}")


def _check_dense(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise ValueError(f"{name} must be a dense tensor, got {'a nested one' if tensor.is_nested else tensor.layout}")


def _check_newer(newer_remainder: Tensor, q: Tensor, causal: bool) -> None:
    _check_dense("newer_remainder", newer_remainder)
    if causal:
        raise ValueError("newer_remainder is what keys newer than all of these left: it needs causal=False")
    dtype = torch.promote_types(q.dtype, torch.float32)
    if newer_remainder.shape != q.shape[:3] or newer_remainder.dtype != dtype or newer_remainder.device != q.device:
        raise ValueError(
            f"newer_remainder must be {dtype} {list(q.shape[:3])} on {q.device}, got {newer_remainder.dtype} "
            f"{list(newer_remainder.shape)} on {newer_remainder.device}"
        )


def _refuse_tangents(*tensors: Tensor) -> None:
    # an operator without a forward-mode derivative drops tangents without a word: the derivative would be zero
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise ValueError("q, k and v must have no forward-mode tangents, got some: use impl='reference'")
