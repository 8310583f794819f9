"""Blocks of older keys combine to what one call returns; each of several packed sequences gives what it gives alone."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_problems import DEVICE, Problem, deterministic, outputs_and_gradients, problem, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sbeval.attention import StickBreakingOutput, stickbreaking_attention

IMPLEMENTATIONS = ["reference", "blockwise", "triton"]
pytestmark = pytest.mark.usefixtures("small_tiles")
ONE, TWO = (torch.tensor(bounds, dtype=torch.int32) for bounds in ([0, 7], [0, 3, 7]))


def combined(blocks: Sequence[StickBreakingOutput]) -> StickBreakingOutput:
    """The blocks' outputs, newest first, as one."""
    (output, remainder), *older = blocks
    for block in older:
        output = output + remainder[..., None] * block.output
        remainder = remainder * block.remainder
    return StickBreakingOutput(output, remainder)


def in_blocks(q: Tensor, k: Tensor, v: Tensor, cuts: Sequence[int], **options: Any) -> StickBreakingOutput:
    """One call for the newest keys, among which the queries are, and one for each block of older keys."""
    seq_start = options.pop("seq_start", None)
    bounds = [0, *cuts, k.shape[2]]
    blocks, newer = [], None
    for index, (start, stop) in enumerate(reversed(list(itertools.pairwise(bounds)))):
        own = {} if seq_start is None else {"seq_start": seq_start - start}
        if index:
            own |= {"causal": False, "newer_remainder": newer}
        blocks.append(stickbreaking_attention(q, k[:, :, start:stop], v[:, :, start:stop], **own, **options))
        left = blocks[-1].remainder.detach()
        newer = left if newer is None else newer * left
    return combined(blocks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_split_of_the_keys_gives_the_dense_result_and_gradients(impl: str, data: st.DataObject) -> None:
    queries = data.draw(st.integers(1, 24), label="queries")
    older = data.draw(st.integers(1, 40), label="older keys")
    cuts = sorted(data.draw(st.lists(st.integers(0, older), min_size=1, max_size=3), label="cuts"))
    p = problem(
        batch=2, heads=2, groups=1, queries=queries, keys=queries + older, head_dim=16, dtype=torch.float32,
        logit_scale=data.draw(st.sampled_from([0.05, 1.0, 3.0])), seed=data.draw(st.integers(0, 9)),
    )  # fmt: skip
    options: dict[str, Any] = {"attend_current": data.draw(st.booleans(), label="attend_current")}
    if data.draw(st.booleans(), label="padded"):
        options["seq_start"] = torch.tensor([0, data.draw(st.integers(0, older))], device=DEVICE)
    dense = outputs_and_gradients(p.to(torch.float64), impl="reference", **options)
    found = outputs_and_gradients(p, in_blocks, cuts=cuts, impl=impl, **options)
    for name in dense:
        error = (found[name].detach() - dense[name]).norm()
        assert error <= 2e-5 * dense[name].norm() + 1e-30, f"{name}: {error} of {dense[name].norm()}"


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("without_atomics", [False, True])
def test_packed_sequences_see_older_keys_of_their_own_alone(impl: str, without_atomics: bool) -> None:
    lengths, older = [5, 0, 33, 20, 1], [70, 9, 0, 33, 40]
    p = problem(heads=2, groups=1, queries=sum(lengths), keys=sum(older), head_dim=10, dtype=torch.float32)
    cu_seqlens, cu_seqlens_k = (
        torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32, device=DEVICE) for each in (lengths, older)
    )
    with deterministic(without_atomics and impl == "triton"):
        packed = outputs_and_gradients(p, impl=impl, causal=False, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    rows, keys = cu_seqlens.tolist(), cu_seqlens_k.tolist()
    for own_rows, own_keys in zip(itertools.pairwise(rows), itertools.pairwise(keys), strict=True):
        of_rows, of_keys = slice(*own_rows), slice(*own_keys)
        alone = Problem(
            q=p.q[:, :, of_rows], k=p.k[:, :, of_keys], v=p.v[:, :, of_keys],
            d_output=p.d_output[:, :, of_rows], d_remainder=p.d_remainder[:, :, of_rows],
        ).to(torch.float64)  # fmt: skip
        exact = outputs_and_gradients(alone, impl="reference", causal=False)
        for name, expected in exact.items():
            own = of_keys if name in ("dk", "dv") else of_rows
            torch.testing.assert_close(packed[name][:, :, own].double(), expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("without_atomics", [False, True])
def test_kernels_without_atomics_agree_over_many_older_keys(without_atomics: bool) -> None:
    p = problem(heads=2, queries=70, keys=600, head_dim=64, dtype=torch.float16, logit_scale=0.3)
    exact = outputs_and_gradients(p.to(torch.float64), impl="reference", causal=False)
    with deterministic(without_atomics):
        found = outputs_and_gradients(p, impl="triton", causal=False)
    for name in exact:
        assert relative_error(found[name], exact[name]) < 5e-3, name


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_no_older_keys_leave_the_whole_stick(impl: str) -> None:
    found = outputs_and_gradients(problem(queries=3, keys=0, dtype=torch.float32), impl=impl, causal=False)
    assert (found["output"] == 0).all()
    assert (found["remainder"] == 1).all()
    assert (found["dq"] == 0).all()


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_what_newer_keys_left_ends_the_walk_within_the_bound(impl: str) -> None:
    p = problem(heads=2, groups=2, queries=40, keys=704, dtype=torch.float32, logit_scale=0.02)
    p.q[..., 0], p.k[..., 0] = 3.0, -3.0
    options: dict[str, Any] = {"impl": impl, "scale": 0.4, "causal": False}

    def remainder(newer: float | None, skip_threshold: float | None = 5e-2) -> torch.Tensor:
        left = None if newer is None else torch.full((1, 2, 40), newer, device=DEVICE)
        return stickbreaking_attention(
            p.q, p.k, p.v, skip_threshold=skip_threshold, newer_remainder=left, **options
        ).remainder

    assert (0.1 * (remainder(0.1) - remainder(None, skip_threshold=None)).abs()).max() <= 5e-2 + 1e-6
    assert (remainder(1e-4) == 1).all(), "keys were visited that no stick reaches"
    assert (remainder(0.1) > remainder(None)).all(), "the walk did not end earlier"


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"newer_remainder": torch.ones(1, 2, 7)}, "needs causal=False"),
        ({"causal": False, "newer_remainder": torch.ones(1, 2, 6)}, r"must be torch.float32 \[1, 2, 7\]"),
        ({"causal": False, "newer_remainder": torch.ones(1, 2, 7).double()}, "must be torch.float32"),
        ({"causal": False, "cu_seqlens": ONE}, "pass cu_seqlens_k"),
        ({"cu_seqlens_k": ONE}, "cu_seqlens_k needs cu_seqlens and causal=False"),
        ({"causal": False, "cu_seqlens": ONE, "cu_seqlens_k": TWO}, "same sequences"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(impl: str, options: dict[str, Any], message: str) -> None:
    p = problem(queries=7, dtype=torch.float32)
    moved = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        stickbreaking_attention(p.q, p.k, p.v, impl=impl, **moved)


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
def test_packing_changes_no_sequence(impl: str, lengths: list[int], attend_current: bool, small_tiles: None) -> None:
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
        ({"cu_seqlens": cumulative([7]), "seq_start": cumulative([])}, "leave out seq_start"),
        ({"cu_seqlens": cumulative([5]), "queries": 5}, "as many queries as keys"),
        ({"cu_seqlens": cumulative([7]), "batch": 2}, "needs batch size 1"),
    ],
)
@pytest.mark.parametrize("impl", ["reference", "blockwise", "triton"])
def test_cumulative_lengths_that_do_not_fit_are_refused(impl: str, changes: dict, message: str) -> None:
    shape = {"batch": 1, "queries": 7} | {name: changes[name] for name in ("batch", "queries") if name in changes}
    options = {name: changes[name] for name in ("cu_seqlens", "seq_start") if name in changes}
    p = problem(keys=7, dtype=torch.float32, **shape)
    with pytest.raises(ValueError, match=message):
        stickbreaking_attention(p.q, p.k, p.v, impl=impl, **options)
