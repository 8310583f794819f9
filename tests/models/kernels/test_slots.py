"""Kernels of a step in slots: a softmax over the keys that are there, and new keys written where they belong."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sbeval.models.kernels.slots import kernel_softmax_decode, kernel_write
from sbeval.models.slots import softmax_decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def heads(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def slot_by_slot(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    outputs = []
    for slot, length in enumerate(lengths):
        own = (x[slot : slot + 1, :, :length].double().repeat_interleave(shared, 1) for x in (k, v))
        seen = torch.ones(q.shape[2], length, dtype=torch.bool, device=DEVICE).tril(length - q.shape[2])
        outputs.append(scaled_dot_product_attention(q[slot : slot + 1].double(), *own, scale=0.3, attn_mask=seen))
    return torch.cat(outputs)


@given(
    lengths=st.lists(st.integers(4, 300), min_size=1, max_size=3), queries=st.integers(1, 4), splits=st.integers(1, 5),
    shared=st.integers(1, 3), head_dim=st.sampled_from([8, 16, 20]), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_however_the_keys_are_split_the_softmax_is_of_each_slot_s_own_keys(
    lengths: list[int], queries: int, splits: int, shared: int, head_dim: int, seed: int
) -> None:
    slots = len(lengths)
    q = heads(slots, 2 * shared, queries, head_dim, seed=seed)
    k, v = heads(slots, 2, 300, head_dim, seed=seed + 1), heads(slots, 2, 300, head_dim, seed=seed + 2)
    for slot, length in enumerate(lengths):
        k[slot, :, length:], v[slot, :, length:] = torch.nan, torch.nan  # not read
    length_B = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    found = kernel_softmax_decode(q, k, v, length_B, 0.3, splits=splits)
    torch.testing.assert_close(found.double(), slot_by_slot(q, k, v, lengths), rtol=1e-4, atol=1e-5)


def test_the_definition_is_the_softmax_of_each_slot_s_own_keys() -> None:
    q, k, v = heads(3, 4, 1, 8, seed=0), heads(3, 2, 40, 8, seed=1), heads(3, 2, 40, 8, seed=2)
    lengths = [40, 1, 17]
    found = softmax_decode(q, k, v, torch.tensor(lengths, dtype=torch.int32, device=DEVICE), scale=0.3)
    torch.testing.assert_close(found.double(), slot_by_slot(q, k, v, lengths), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_keys_go_to_their_positions_and_round_a_ring(dtype: torch.dtype) -> None:
    k, v = (torch.zeros(3, 2, 10, 12, dtype=dtype, device=DEVICE) for _ in range(2))
    # as a projection leaves them: [B, Q, G, D] transposed
    new_k, new_v = (heads(3, 2, 2, 12, seed=seed, dtype=dtype).transpose(1, 2) for seed in (0, 1))
    positions = [0, 9, 24]
    kernel_write(k, v, new_k, new_v, torch.tensor(positions, dtype=torch.int32, device=DEVICE))
    for room, new in ((k, new_k), (v, new_v)):
        for slot, position in enumerate(positions):
            for query in range(2):
                assert torch.equal(room[slot, :, (position + query) % 10], new[slot, :, query])
        assert int(room.any(-1).sum()) == 12
