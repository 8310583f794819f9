"""New keys and values written into slots, in one pass.

Shape suffixes: B slots, G key/value heads, Q new positions, K room for keys, D head_dim.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["room"])
def _kernel(
    new_k, new_v, k, v, position_ptr, room,
    new_k_b, new_k_h, new_k_l, new_v_b, new_v_h, new_v_l, k_b, k_h, k_l, v_b, v_h, v_l,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    # a room smaller than the text is a ring of its newest keys
    new = tl.program_id(2).to(tl.int64)
    place = (tl.load(position_ptr + batch).to(tl.int64) + new) % room
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < HEADS) & (dim < HEAD_DIM)
    key = tl.load(new_k + batch * new_k_b + head * new_k_h + new * new_k_l + dim, mask=mask)
    value = tl.load(new_v + batch * new_v_b + head * new_v_h + new * new_v_l + dim, mask=mask)
    tl.store(k + batch * k_b + head * k_h + place * k_l + dim, key, mask=mask)
    tl.store(v + batch * v_b + head * v_h + place * v_l + dim, value, mask=mask)


def kernel_write(k_BGKD: Tensor, v_BGKD: Tensor, new_k_BGQD: Tensor, new_v_BGQD: Tensor, position_B: Tensor) -> None:
    """Writes Q positions of each slot, from `position_B` on, modulo the room.

    Args:
        k_BGKD: room for keys, last dimension contiguous.
        v_BGKD: likewise.
        new_k_BGQD: what to write, in their dtype.
        new_v_BGQD: likewise.
        position_B: integers on the device.
    """
    new_k_BGQD, new_v_BGQD = (x if x.stride(-1) == 1 else x.contiguous() for x in (new_k_BGQD, new_v_BGQD))
    batch, heads, room, head_dim = k_BGKD.shape
    block_head_dim = triton.next_power_of_2(head_dim)
    block_heads = min(triton.next_power_of_2(heads), max(1, 2048 // block_head_dim))
    with torch.cuda.device(k_BGKD.device) if k_BGKD.is_cuda else contextlib.nullcontext():
        _kernel[(batch, -(-heads // block_heads), new_k_BGQD.shape[2])](
            new_k_BGQD, new_v_BGQD, k_BGKD, v_BGKD, position_B, room,
            *new_k_BGQD.stride()[:3], *new_v_BGQD.stride()[:3], *k_BGKD.stride()[:3], *v_BGKD.stride()[:3],
            HEADS=heads, HEAD_DIM=head_dim, BLOCK_H=block_heads, BLOCK_D=block_head_dim, num_warps=4,
        )  # fmt: skip
