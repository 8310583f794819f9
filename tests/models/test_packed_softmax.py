"""Packed texts are mixed as each text alone is, by whichever way."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from sbeval.models.biases import AlibiBias
from sbeval.models.packed_softmax import VarlenAttention, packed_softmax_attention, suits_varlen, text_by_text

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float64


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """What PyTorch's documentation says of its variable-length attention, over all pairs: that has no CPU kernel."""
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    index = torch.arange(len(query))
    text = torch.bucketize(index, cu_seq_q[1:], right=True)
    apart = index[:, None] - index
    left, right = window_size
    seen = (text[:, None] == text) & (apart >= -right) & ((apart <= left) if left >= 0 else True)
    logits = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(~seen, -torch.inf).softmax(-1), value)


ATTENTION = VarlenAttention() if ON_GPU else VarlenAttention(dense)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    window=st.sampled_from([None, 1, 7, 1000]),
    heads=st.sampled_from([(2, 2), (4, 2)]),
    seed=st.integers(0, 100),
)
def test_all_texts_at_once_are_the_texts_one_by_one(
    lengths: list[int], window: int | None, heads: tuple[int, int], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, count, sum(lengths), 16) for count in (heads[0], heads[1], heads[1])]
    at_once, one_by_one = (
        [x.to(DEVICE, DTYPE).requires_grad_() for x in parts]
        for parts in [[torch.randn(shape, generator=generator) for shape in shapes]] * 2
    )
    begins = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    found = ATTENTION(*at_once, lengths=lengths, scale=0.3, sliding_window=window, cu_seqlens=begins)
    assert found is not None
    expected = text_by_text(*one_by_one, lengths=lengths, scale=0.3, sliding_window=window)
    near = {"rtol": 2e-2, "atol": 2e-2} if ON_GPU else {"rtol": 1e-9, "atol": 1e-9}
    assert_close(found, expected, **near)
    upstream = torch.randn(expected.shape, generator=generator).to(DEVICE, DTYPE)
    found.backward(upstream)
    expected.backward(upstream)
    for mine, other in zip(at_once, one_by_one, strict=True):
        assert_close(mine.grad, other.grad, **near)


def test_it_is_for_16_bits_on_a_gpu_without_a_bias() -> None:
    heads = torch.zeros(1, 2, 5, 16, dtype=torch.bfloat16, device=DEVICE)
    assert suits_varlen(heads, None) == ON_GPU
    assert not suits_varlen(heads.float(), None)
    assert not suits_varlen(heads[..., :12], None)
    assert not suits_varlen(heads, AlibiBias(2))


@torch.no_grad()
def test_a_bias_counts_from_each_texts_own_beginning() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64).unbind()
    bias, lengths = AlibiBias(2), [4, 0, 5]
    whole = packed_softmax_attention(
        q, k, v, lengths, scale=0.3, bias=bias, position_ids_1T=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    )
    second = packed_softmax_attention(
        q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], [5], scale=0.3, bias=bias, position_ids_1T=torch.arange(5)[None]
    )
    assert_close(whole[:, :, 4:], second)
