"""The public functions of stick-breaking attention: they check the inputs and call the chosen implementation.

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
    """The output of stick-breaking attention and the attention weight that no key received.

    Attributes:
        output: [B, H, Q, D] in the queries' dtype.
        remainder: [B, H, Q] in fp32 (fp64 for fp64 inputs): one minus the sum of each query's weights.
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
    """Computes stick-breaking attention (Tan et al. 2025, arXiv 2410.17980, equations 1 to 4).

    With z_ij = scale * q_j . k_i and beta_ij = sigmoid(z_ij), query j gives key i < j the weight
    A_ij = beta_ij * prod_{i<k<j} (1 - beta_kj). Each query has a stick of length 1: the newest key takes the share beta
    of it, the next older key its share of the rest, and so on. There are no position embeddings. The output is
    sum_i A_ij v_i and the remainder is 1 - sum_i A_ij.

    Args:
        q: [B, H, Q, D] queries. If Q < K they are the last Q positions. Any strides are fine, as for k and v.
        k: [B, G, K, D] keys; H is a multiple of G, and query head h uses key/value head h // (H // G).
        v: [B, G, K, D] values. As in softmax attention, a weight of 0 times infinity or NaN is NaN: an infinite value
            can make a row NaN although this row gives it no weight, if another row of the same tile does.
        scale: factor of the logits; None means D ** -0.5.
        attend_current: let a query attend to its own position as well (i <= j instead of i < j).
        seq_start: [B] integers for left-padded batches: keys before position seq_start[b] get no weight, so rows before
            it have output 0 and remainder 1. None means 0 everywhere.
        cu_seqlens: int32 [n + 1] for n packed sequences, on the tensors' device: q is [1, H, T, D], k and v are
            [1, G, T, D], and sequence s is tokens cu_seqlens[s] up to cu_seqlens[s + 1], which see no other sequence.
            The values rise from 0 to T. A sequence may be empty. With `causal=False`, `cu_seqlens` describes only the
            queries. On CUDA, checking its values costs one transfer to the host; they are not checked while a CUDA
            graph is captured or torch.compile traces.
        cu_seqlens_k: int32 [n + 1], the bounds of the key sequences for `causal=False`: query sequence s sees all of
            key sequence s.
        skip_threshold: stop looking back once every query of a block has less than this much of its stick left. The
            output then changes by at most `skip_threshold * max|v|` and the remainder by at most `skip_threshold`. None
            visits every key until the stick is below the smallest normal number of fp32.
        causal: whether queries are the last positions of the keys. False: every key is older than every query, and
            their numbers may differ. Calls on blocks of keys, newest to oldest, combine to the result of one call on
            all keys: output o1 + r1 o2 + r1 r2 o3 + ..., remainder r1 r2 r3 ...
        newer_remainder: [B, H, Q] fp32 (fp64 for fp64 inputs), only with `causal=False`: the product of the remainders
            of newer blocks. Keys are skipped once the product of `newer_remainder` and the stick is below the
            threshold. The argument changes nothing else, and gets no gradient.
        impl: "reference" (O(L^2) memory, the definition), "blockwise" (plain PyTorch, O(L) memory, any device),
            "triton" (CUDA), or "auto": "triton" for CUDA tensors it supports, else "blockwise".

    Returns:
        `StickBreakingOutput(output, remainder)`, both differentiable once. torch.compile sees the call as one operator.
        CUDA graphs can capture it; call it once before, as a warm-up that compiles the kernels. Gradients from "triton"
        differ in their last bits from run to run, unless `torch.use_deterministic_algorithms(True)` is set; the
        backward pass then computes every tile twice.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, Q > K, the implementation cannot run on these tensors, or the
            inputs have forward-mode tangents, which only "reference" supports.
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
        # imported here because Triton is not installed on every machine
        from sbeval.attention.impl.triton import triton_attention

        return StickBreakingOutput(*triton_attention(*inputs, skip_threshold, cu_seqlens_k, newer_remainder, causal))
    # autocast would round the logits to 16 bits
    with torch.autocast(q.device.type, enabled=False) if q.device.type in AUTOCAST_DEVICES else nullcontext():
        if impl == "reference":
            from sbeval.attention.impl.reference import reference  # only the chosen implementation is loaded

            return StickBreakingOutput(*reference(*inputs, cu_seqlens_k, causal))
        from sbeval.attention.impl.blockwise import blockwise  # only the chosen implementation is loaded

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
    """Computes stick-breaking attention for a decode step over a KV cache with slots of fixed size, without gradients.

    On a GPU nothing is read back from the device, so a CUDA graph can capture the call and replay it as texts grow.

    `k_BGKD` and `v_BGKD` are the cached keys and values. Slot b holds `length_B[b]` (integers, at least Q) of them, at
    its start; the last Q of these are the queries' positions. Cache entries after these keys must be finite. The other
    options are those of `stickbreaking_attention`. `impl="auto"` runs the Triton kernels on a GPU.
    """
    if impl == "triton" or (impl == "auto" and q_BHQD.is_cuda and q_BHQD.dtype != torch.float64):
        from sbeval.attention.impl.triton.decode_slots import decode_slots  # Triton is not installed everywhere
        from sbeval.attention.impl.triton.function import LOG2_NOTHING_LEFT  # Triton is not installed everywhere

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
    """Returns keys and values, left-padded to the longest slot's length, and each text's first position, [B]."""
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
    """Checks that the inputs of `stickbreaking_attention` fit each other.

    Raises:
        ValueError: a shape, dtype, device or option does not fit.
    """
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
            raise ValueError("cu_seqlens already says where the packed sequences begin: leave out seq_start")
        _check_dense("cu_seqlens", cu_seqlens)
        if cu_seqlens_k is not None:
            _check_dense("cu_seqlens_k", cu_seqlens_k)
        elif not causal:
            raise ValueError("with causal=False, cu_seqlens describes only the queries: pass cu_seqlens_k for the keys")
        check_cu_seqlens(cu_seqlens, q, k, cu_seqlens_k)
    if cu_seqlens_k is not None and (causal or cu_seqlens is None):
        raise ValueError("cu_seqlens_k needs cu_seqlens and causal=False: leave it out, or pass both")
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
        raise ValueError("newer_remainder, the remainder of a call on newer keys, needs causal=False: leave it out")
    dtype = torch.promote_types(q.dtype, torch.float32)
    if newer_remainder.shape != q.shape[:3] or newer_remainder.dtype != dtype or newer_remainder.device != q.device:
        raise ValueError(
            f"newer_remainder must be {dtype} {list(q.shape[:3])} on {q.device}, got {newer_remainder.dtype} "
            f"{list(newer_remainder.shape)} on {newer_remainder.device}"
        )


def _refuse_tangents(*tensors: Tensor) -> None:
    # PyTorch silently drops the tangents of an operator that has no forward-mode derivative: it would be zero
    if forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise ValueError("q, k or v has a forward-mode tangent, which only impl='reference' supports: use that")
