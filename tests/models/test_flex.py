"""FlexAttention with our biases and windows is the definition's softmax, and packed texts are mixed as each alone."""

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from sbeval.models import flex
from sbeval.models.biases import AlibiBias
from sbeval.models.packed_softmax import VarlenAttention, packed_softmax_attention, suits_varlen, text_by_text
from sbeval.models.softmax import softmax_attention
from tests.models.small import listed_blocks, make_bias

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# compiling for a CPU takes minutes over all cases; not compiled it computes the same from all pairs
ATTENTION = flex.CompiledFlexAttention() if ON_GPU else flex.flex_causal_attention
WINDOWS = [37, 200, 10**6] if ON_GPU else [1, 37, 128, 200, 10**6]  # a window of 1 would be compiled for itself
NEAR = {"rtol": 1e-4, "atol": 3e-4} if ON_GPU else {"rtol": 1e-5, "atol": 1e-5}  # TF32 or the like in its products


@pytest.mark.exhaustive
@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(["none", "alibi", "fire"]),
    length=st.sampled_from([1, 60, 128, 300]),
    window=st.sampled_from(WINDOWS),
    heads=st.sampled_from([(4, 4), (6, 2)]),
    later=st.sampled_from([0, 1000]),
)
@torch.no_grad()
def test_it_is_attention_by_definition(kind, length, window, heads, later):
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(1, h, length, 16, generator=generator).to(DEVICE) for h in (heads[0], heads[1], heads[1]))
    bias = make_bias(kind, heads[0])
    positions = torch.arange(later, later + length, device=DEVICE)
    expected = softmax_attention(
        q.double(), k.double(), v.double(), scale=0.3, sliding_window=window, bias=bias, position_ids_BQ=positions[None]
    )
    score_mod = None if bias is None else bias.score_mod(positions, q.device)
    found = ATTENTION(q, k, v, scale=0.3, sliding_window=min(window, length), score_mod=score_mod)
    assert_close(found.double(), expected, **NEAR)


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 900), window=st.integers(1, 1000))
def test_blocks_hold_every_pair_that_is_seen_and_full_ones_no_other(length, window):
    blocks = flex.causal_blocks(length, window, torch.device("cpu"))
    count = -(-length // 128)
    index = torch.arange(count * 128)
    distance = index[:, None] - index
    seen = ((distance >= 0) & (distance < window)).view(count, 128, count, 128)
    partial, full = listed_blocks(blocks, count)
    assert torch.equal(full, seen.all(3).all(1))
    assert torch.equal(full | partial, seen.any(3).any(1))


@pytest.mark.parametrize(
    ("kernel", "instead"), [(flex.CompiledFlexAttention, "blocks of rows"), (VarlenAttention, "text")]
)
@pytest.mark.parametrize("error", [RuntimeError("there is no compiler\nand more"), torch.OutOfMemoryError()])
def test_a_failure_is_told_once_and_not_met_again_unless_memory_ran_out(kernel, instead, error, caplog):
    calls = []

    def fails(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        raise error

    attention, heads, no_memory = kernel(fails), torch.randn(3, 1, 2, 5, 16), isinstance(error, torch.OutOfMemoryError)
    own = {"score_mod": None} if kernel is flex.CompiledFlexAttention else {"lengths": [2, 3], "cu_seqlens": None}
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError) if no_memory else contextlib.nullcontext():
            assert attention(*heads, **own, scale=0.3, sliding_window=5) is None
    assert (attention.works, len(calls)) == (no_memory, 1 + attention.works)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1 - attention.works
    assert all("does not run here (there is no compiler): " in said and instead in said for said in messages)


@pytest.mark.parametrize("with_gradient", ["q", "k", "v", "bias", None])
def test_whatever_keeps_a_gradient_keeps_flex_out(with_gradient):
    with FakeTensorMode():
        tensors = {name: torch.empty(1, 2, flex.SHORTEST, 64, device="cuda") for name in ("q", "k", "v", "bias")}
        if with_gradient is not None:
            tensors[with_gradient].requires_grad_()
        assert flex.suits_flex(*tensors.values()) == (with_gradient is None)
        with torch.no_grad():
            assert flex.suits_flex(*tensors.values())


@pytest.mark.exhaustive
def test_one_process_may_compile_more_kinds_than_dynamo_allows_by_itself():
    compiled = torch.compile(flex.flex_with_options, dynamic=True, fullgraph=True, backend="eager")
    attention = flex.CompiledFlexAttention(compiled)
    kinds = range(2, torch._dynamo.config.recompile_limit + 4)
    torch._dynamo.reset()
    for heads in kinds:
        q, k, v = torch.randn(3, 1, heads, 5, 16)
        with torch.no_grad():
            assert attention(q, k, v, scale=0.3, sliding_window=5, score_mod=None) is not None
    assert attention.works


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 500))
def test_positions_of_fire_reach_to_the_end_of_the_last_block(length):
    add = make_bias("fire", 2).score_mod(torch.arange(length, device=DEVICE), torch.device(DEVICE))
    last = torch.tensor(flex.whole_blocks(length) - 1, device=DEVICE)
    zero = torch.zeros((), device=DEVICE)
    assert add(zero, zero.int(), zero.int(), last, last).isfinite()


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


PACKED = VarlenAttention() if ON_GPU else VarlenAttention(dense)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    window=st.sampled_from([None, 1, 7, 1000]),
    heads=st.sampled_from([(2, 2), (4, 2)]),
    seed=st.integers(0, 100),
)
def test_all_texts_at_once_are_the_texts_one_by_one(lengths, window, heads, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, count, sum(lengths), 16) for count in (heads[0], heads[1], heads[1])]
    at_once, one_by_one = (
        [x.to(DEVICE, DTYPE).requires_grad_() for x in parts]
        for parts in [[torch.randn(shape, generator=generator) for shape in shapes]] * 2
    )
    begins = torch.tensor([0, *lengths], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    found = PACKED(*at_once, lengths=lengths, scale=0.3, sliding_window=window, cu_seqlens=begins)
    expected = text_by_text(*one_by_one, lengths=lengths, scale=0.3, sliding_window=window)
    near = {"rtol": 2e-2, "atol": 2e-2} if ON_GPU else {"rtol": 1e-9, "atol": 1e-9}
    assert_close(found, expected, **near)
    upstream = torch.randn(expected.shape, generator=generator).to(DEVICE, DTYPE)
    found.backward(upstream)
    expected.backward(upstream)
    for mine, other in zip(at_once, one_by_one, strict=True):
        assert_close(mine.grad, other.grad, **near)


def test_it_is_for_16_bits_on_a_gpu_without_a_bias():
    heads = torch.zeros(1, 2, 5, 16, dtype=torch.bfloat16, device=DEVICE)
    assert suits_varlen(heads, None) == ON_GPU
    assert not suits_varlen(heads.float(), None)
    assert not suits_varlen(heads[..., :12], None)
    assert not suits_varlen(heads, AlibiBias(2))


@torch.no_grad()
def test_a_bias_counts_from_each_texts_own_beginning():
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
