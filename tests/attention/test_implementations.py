"""Every implementation against the fp64 reference, on ragged shapes, with gradients."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from attention_problems import (
    DEVICE,
    Problem,
    assert_kernels_within_budget,
    assert_within_budget,
    deterministic,
    largest_logit,
    outputs_and_gradients,
    problem,
    relative_error,
)
from torch import Tensor

from sbeval.attention import stickbreaking_attention
from sbeval.attention.impl.reference import log_weights
from sbeval.attention.impl.triton import forward

SHAPES = [
    pytest.param({"queries": 1}, id="1"),
    pytest.param({"queries": 63, "head_dim": 50}, id="63-dim50"),
    pytest.param({"queries": 65, "batch": 2, "heads": 4, "groups": 2}, id="65-grouped"),
    pytest.param({"queries": 5, "keys": 200, "head_dim": 80}, id="5of200-dim80"),
    pytest.param({"queries": 129, "keys": 140, "logit_scale": 3.0}, id="129of140-large-logits"),
    pytest.param({"queries": 130, "head_dim": 64, "logit_scale": 0.05}, id="130-flat-logits"),
    pytest.param({"queries": 33, "keys": 40, "head_dim": 96, "heads": 3}, id="33of40-dim96-three-heads"),
    pytest.param({"queries": 17, "keys": 33, "head_dim": 256}, id="17of33-dim256"),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attend_current", [False, True], ids=["strict", "current"])
def test_blockwise_equals_reference(shape: dict, attend_current: bool, small_tiles: None) -> None:
    p = problem(**shape)
    exact = outputs_and_gradients(p, impl="reference", attend_current=attend_current)
    torch.testing.assert_close(outputs_and_gradients(p, impl="blockwise", attend_current=attend_current), exact)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_kernels_meet_the_error_budget(shape: dict, dtype: torch.dtype) -> None:
    assert_kernels_within_budget(problem(**shape, dtype=dtype))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's bf16 products are wrong, so bf16 needs a GPU")
@pytest.mark.parametrize("head_dim", [32, 50, 64, 96, 128, 256])
@pytest.mark.parametrize("fewest_pairs", [0, 2**62], ids=["copy-engine", "pointers"])
def test_kernels_meet_the_budget_in_bf16(head_dim: int, fewest_pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "FEWEST_PAIRS_TO_COPY", fewest_pairs)
    assert_kernels_within_budget(problem(queries=700, keys=900, head_dim=head_dim, dtype=torch.bfloat16))


@pytest.mark.parametrize("impl", ["reference", "blockwise", "triton"])
def test_left_padding_changes_nothing(impl: str) -> None:
    padding = 37
    alone = problem(batch=1, queries=90, dtype=torch.float32)
    padded = problem(batch=2, queries=90 + padding, dtype=torch.float32, seed=1)
    for name in ("q", "k", "v", "d_output", "d_remainder"):
        getattr(padded, name)[1, :, padding:] = getattr(alone, name)[0]
    start = torch.tensor([0, padding], device=DEVICE)
    expected = outputs_and_gradients(alone, impl=impl)
    found = outputs_and_gradients(padded, impl=impl, seq_start=start)
    for name in expected:
        assert relative_error(found[name][1, :, padding:], expected[name][0]) < 1e-5, name
    assert (found["output"][1, :, :padding] == 0).all()
    assert (found["remainder"][1, :, :padding] == 1).all()
    for name in ("dq", "dk", "dv"):
        assert (found[name][1, :, :padding] == 0).all(), name


@pytest.mark.parametrize("impl", ["reference", "blockwise", "triton"])
@pytest.mark.parametrize("without_atomics", [False, True])
def test_a_sequence_said_to_begin_before_the_first_key_begins_there(impl: str, without_atomics: bool) -> None:
    p = problem(batch=2, queries=40, dtype=torch.float32)
    before, first = (torch.tensor(starts, device=DEVICE) for starts in ([-300, -1], [0, 0]))
    with deterministic(without_atomics):
        expected, found = (outputs_and_gradients(p, impl=impl, seq_start=start) for start in (first, before))
    for name in expected:
        assert relative_error(found[name], expected[name]) < 1e-6, name
    last = stickbreaking_attention(p.q[:, :, -2:], p.k, p.v, seq_start=before, impl=impl)
    torch.testing.assert_close(last.output, expected["output"][:, :, -2:])


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("threshold", [1e-1, 1e-3, 1e-5])
def test_skipping_stays_within_its_bound(impl: str, threshold: float) -> None:
    p = problem(queries=100, keys=900, heads=1, dtype=torch.float32, logit_scale=0.02)
    p.q[..., 0], p.k[..., 0] = 3.0, -3.0  # about 2 % of the stick per key, so that no stick is spent within a tile
    exact = stickbreaking_attention(p.q, p.k, p.v, impl="reference", scale=0.4)
    plain = stickbreaking_attention(p.q, p.k, p.v, impl=impl, scale=0.4)
    found = stickbreaking_attention(p.q, p.k, p.v, impl=impl, scale=0.4, skip_threshold=threshold)
    assert (found.output - exact.output).abs().max() <= threshold * p.v.abs().max() + 1e-5
    assert (found.remainder - exact.remainder).abs().max() <= threshold + 1e-6
    assert not torch.equal(found.remainder, plain.remainder), "nothing was skipped"


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_strided_inputs_give_the_same_result(impl: str) -> None:
    p = problem(heads=4, groups=4, queries=70, dtype=torch.float32)
    strided = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (p.q, p.k, p.v)]
    expected = stickbreaking_attention(p.q, p.k, p.v, impl=impl)
    assert torch.equal(stickbreaking_attention(*strided, impl=impl).output, expected.output)


@pytest.mark.parametrize("impl", ["reference", "blockwise", "triton"])
def test_queries_may_share_memory(impl: str) -> None:
    p = problem(heads=2, queries=40, dtype=torch.float32)
    windows = p.q.flatten().unfold(0, 16, 4)[:80].unflatten(0, (1, 2, 40))
    assert windows.stride() == (320, 160, 4, 1)
    apart = dataclasses.replace(p, q=windows.contiguous())
    expected, found = (outputs_and_gradients(each, impl=impl) for each in (apart, dataclasses.replace(p, q=windows)))
    for name in expected:
        assert relative_error(found[name], expected[name]) < 1e-6, name
    with torch.no_grad():
        shared = stickbreaking_attention(windows, p.k, p.v, impl=impl)
    torch.testing.assert_close(shared.output, expected["output"])


@pytest.mark.parametrize("impl", ["reference", "blockwise", "triton"])
@pytest.mark.parametrize("keys", [40, 600], ids=["40", "600"])
def test_starts_may_lie_apart_in_memory(impl: str, keys: int) -> None:
    p = problem(batch=2, queries=2 if keys == 600 else 40, keys=keys, dtype=torch.float32)
    table = torch.tensor([[3, 99], [17, 99]], device=DEVICE)
    for starts in (table[:, 0], table[0, :1].expand(2)):
        expected, found = (
            outputs_and_gradients(p, impl=impl, seq_start=each) for each in (starts.contiguous(), starts)
        )
        for name in expected:
            assert relative_error(found[name], expected[name]) < 1e-6, name
        with torch.no_grad():
            inferred = stickbreaking_attention(p.q, p.k, p.v, impl=impl, seq_start=starts)
        torch.testing.assert_close(inferred.output, expected["output"])


def test_gradients_are_right_where_rows_of_one_block_stopped_at_different_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("forward", "backward"):
        monkeypatch.setattr(f"sbeval.attention.impl.triton.{each}.shared_memory_bytes", lambda tensor: 227 * 1024)
    low = problem(queries=256, head_dim=128, dtype=torch.float16)
    # 64 rows spend their stick within a tile, the rows around them visit every key
    low.k[..., 0] = 6.0
    low.q[..., 0] = -6.0
    low.q[:, :, 128:192, 0] = 15.0
    assert_kernels_within_budget(low)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("left", [0.0, 0.5], ids=["dropped", "halved"])
def test_the_error_budget_notices_any_one_tile(dtype: torch.dtype, left: float) -> None:
    p = problem(queries=256, heads=1, logit_scale=0.1)
    p.q[..., 0], p.k[..., 0] = 4.0, -5.0  # under 1 % of the stick per key, so that every tile counts
    log_A, _ = log_weights(p.q, p.k, 0.25, False, None)
    weights = log_A.exp()
    exact = weights @ p.v
    rounded = exact.to(dtype)
    limits = {"largest_logit": largest_logit(p), "dtype": dtype}
    assert_within_budget(rounded, exact, rounded, "output", **limits)
    tile = 32
    for row in range(0, 256, tile):
        for key in range(0, row + 1, tile):
            broken = weights.clone()
            broken[..., row : row + tile, key : key + tile] *= left
            with pytest.raises(AssertionError, match="allowed"):
                assert_within_budget((broken @ p.v).to(dtype), exact, rounded, "output", **limits)


def test_threads_share_the_work_and_leave_their_number_as_it_was(small_tiles: None) -> None:
    before = torch.get_num_threads()
    p = problem(batch=2, heads=4, groups=2, queries=150, keys=160)
    exact = outputs_and_gradients(p, impl="reference")
    try:
        for threads in (1, 3, 16):
            torch.set_num_threads(threads)
            found = outputs_and_gradients(p, impl="blockwise")
            assert torch.get_num_threads() == threads
            torch.testing.assert_close(found, exact)
            with torch.inference_mode():
                inferred = stickbreaking_attention(p.q, p.k, p.v, impl="blockwise")
            torch.testing.assert_close(inferred.output, exact["output"])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("impl", ["reference", "blockwise"])
def test_autocast_does_not_round_the_logits(impl: str) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=draw) * 3 for _ in range(3))
    expected = stickbreaking_attention(q, k, v, impl=impl)
    with torch.autocast("cpu", torch.bfloat16):
        found = stickbreaking_attention(q, k, v, impl=impl)
    assert found.output.dtype == q.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


ON_GPU = DEVICE == "cuda"
TOKENS = 1_048_603 if ON_GPU else 2_053
APART = (1 << 31) + 48 if ON_GPU else 1 << 16
"""Numbers between two heads of a tensor."""
BUDGET = 2e-2 if ON_GPU else 1e-5


def long_problem() -> Problem:
    """Logits around -13 on a GPU: after a million keys a few percent of the stick remain."""
    p = problem(heads=1, queries=TOKENS, head_dim=64, dtype=torch.bfloat16 if ON_GPU else torch.float32)
    p.q[..., 0], p.k[..., 0] = 13.0, -8.0
    return p


def test_rows_of_a_long_text_equal_the_definition() -> None:
    p = long_problem()
    inputs = {"q": p.q, "k": p.k, "v": p.v}
    rows = [0, 1, TOKENS // 2 + 7, TOKENS - 1]
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    output = stickbreaking_attention(**leaves)
    d_rows = p.d_output[0, 0, rows]
    d_output = torch.zeros_like(output.output)
    d_output[0, 0, rows] = d_rows
    found = dict(zip("qkv", torch.autograd.grad(output.output, list(leaves.values()), d_output), strict=True))
    expected = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in inputs.items()}
    for row, d_row in zip(rows, d_rows, strict=True):
        seen = {name: x[:, :, : row + 1].double().requires_grad_() for name, x in inputs.items()}
        last = seen["q"][:, :, row:].detach().requires_grad_()
        exact = stickbreaking_attention(last, seen["k"], seen["v"], impl="reference")
        assert relative_error(output.output.detach()[:, :, row], exact.output.detach()[:, :, 0]) < BUDGET, row
        assert abs(float(output.remainder.detach()[0, 0, row] / exact.remainder.detach()[0, 0, 0]) - 1) < BUDGET, row
        gradients = torch.autograd.grad(exact.output, [last, seen["k"], seen["v"]], d_row.double()[None, None, None])
        expected["q"][:, :, row] += gradients[0][:, :, 0]
        expected["k"][:, :, : row + 1] += gradients[1]
        expected["v"][:, :, : row + 1] += gradients[2]
    for name in "qkv":
        assert relative_error(found[name], expected[name]) < BUDGET, name


@pytest.mark.parametrize("head_dim", [32, 64])
def test_heads_may_lie_billions_of_numbers_apart(head_dim: int) -> None:
    near = problem(heads=2, groups=2, queries=300, head_dim=head_dim, dtype=torch.float16 if ON_GPU else torch.float32)

    def apart(x: Tensor) -> Tensor:
        room = torch.empty(APART + x[:, 0].numel(), dtype=x.dtype, device=x.device)
        far = room.as_strided(x.shape, (x.shape[2] * head_dim, APART, head_dim, 1))
        return far.copy_(x)

    far = [apart(x) for x in (near.q, near.k, near.v)]
    expected = stickbreaking_attention(near.q, near.k, near.v)
    torch.testing.assert_close(stickbreaking_attention(*far), expected, rtol=0, atol=0)
    for together in zip(
        *(_gradients(tensors, near.d_output) for tensors in (far, (near.q, near.k, near.v))), strict=True
    ):
        assert relative_error(*together) < 1e-3  # gradients of keys are summed by atomics, in no fixed order


def _gradients(tensors: Sequence[Tensor], d_output: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(stickbreaking_attention(*leaves).output, leaves, d_output)
