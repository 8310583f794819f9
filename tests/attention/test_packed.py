"""Packed sequences: each gives what it gives alone, and cumulative lengths that do not fit are refused."""

import pytest
import torch
from attention_problems import DEVICE, outputs_and_gradients, problem, relative_error
from torch import Tensor

from sbeval.attention import stickbreaking_attention

LENGTHS = [
    pytest.param([45], id="one"),
    pytest.param([1, 16, 40, 1, 33], id="ragged"),
    pytest.param([0, 33, 0, 0, 50, 0], id="empty-ones"),
    pytest.param([1] * 6, id="single-tokens"),
    pytest.param([9, 140, 51], id="over-several-blocks"),
]


def cumulative(lengths: list[int], **options: object) -> Tensor:
    options = {"dtype": torch.int32, "device": DEVICE, **options}
    return torch.tensor([0, *lengths], device="cpu").cumsum(0).to(**options)  # type: ignore[call-overload]


@pytest.mark.parametrize("impl", ["reference", "blockwise", "triton"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("attend_current", [False, True], ids=["strict", "current"])
def test_packed_sequences_give_what_each_gives_alone(
    impl: str, lengths: list[int], attend_current: bool, small_tiles: None
) -> None:
    p = problem(heads=2, groups=1, queries=sum(lengths), head_dim=10, dtype=torch.float32)
    options = {"impl": impl, "attend_current": attend_current}
    packed = outputs_and_gradients(p, cu_seqlens=cumulative(lengths), **options)
    begin = 0
    for length in lengths:
        own = slice(begin, begin + length)
        if length:
            alone = outputs_and_gradients(p.rows(own), **options)
            for name in alone:
                assert relative_error(packed[name][:, :, own], alone[name]) < 1e-5, f"{name} of {own}"
        begin += length


@pytest.mark.parametrize(("impl", "gradient_error"), [("blockwise", 0.2), ("triton", 0.1)])
def test_packed_sequences_skip_within_the_bound(impl: str, gradient_error: float, small_tiles: None) -> None:
    p = problem(heads=1, queries=400, dtype=torch.float32, logit_scale=0.02)
    p.q[..., 0], p.k[..., 0] = 3.0, -3.0
    options = {"cu_seqlens": cumulative([9, 340, 51]), "scale": 0.4}
    exact = outputs_and_gradients(p, impl="reference", **options)
    found = outputs_and_gradients(p, impl=impl, skip_threshold=5e-2, **options)
    assert (found["output"] - exact["output"]).abs().max() <= 5e-2 * p.v.abs().max() + 1e-5
    assert (found["remainder"] - exact["remainder"]).abs().max() <= 5e-2 + 1e-6
    for name in ("dq", "dk", "dv"):
        assert relative_error(found[name], exact[name]) < gradient_error, name
    plain = stickbreaking_attention(p.q, p.k, p.v, impl=impl, **options)
    assert not torch.equal(found["remainder"], plain.remainder), "nothing was skipped"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": cumulative([4, 3], dtype=torch.int64)}, r"must be int32 \[sequences \+ 1\]"),
        ({"cu_seqlens": cumulative([4, 3])[None]}, r"must be int32 \[sequences \+ 1\]"),
        ({"cu_seqlens": cumulative([])}, r"must be int32 \[sequences \+ 1\]"),
        ({"cu_seqlens": cumulative([4, 3], device="meta")}, "must be on"),
        ({"cu_seqlens": cumulative([5, -2, 4])}, r"rise from 0 to the number of tokens, 7, got \[0, 5, 3, 7\]"),
        ({"cu_seqlens": cumulative([4, 2])}, "rise from 0"),
        ({"cu_seqlens": cumulative([4, 4])}, "rise from 0"),
        ({"cu_seqlens": cumulative([2, 5])[1:]}, "rise from 0"),
        ({"cu_seqlens": cumulative([7]), "seq_start": cumulative([])}, "seq_start must be None"),
        ({"cu_seqlens": cumulative([5]), "queries": 5}, "as many queries as keys"),
        ({"cu_seqlens": cumulative([7]), "batch": 2}, "batch of one"),
    ],
)
@pytest.mark.parametrize("impl", ["reference", "blockwise", "triton"])
def test_cumulative_lengths_that_do_not_fit_are_refused(impl: str, changes: dict, message: str) -> None:
    shape = {"batch": 1, "queries": 7} | {name: changes[name] for name in ("batch", "queries") if name in changes}
    options = {name: changes[name] for name in ("cu_seqlens", "seq_start") if name in changes}
    p = problem(keys=7, dtype=torch.float32, **shape)
    with pytest.raises(ValueError, match=message):
        stickbreaking_attention(p.q, p.k, p.v, impl=impl, **options)
