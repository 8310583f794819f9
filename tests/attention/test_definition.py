"""The reference against the definition written out, and what follows: too large logits, numbers that are none."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from attention_problems import DEVICE, Problem, outputs_and_gradients, problem
from torch import Tensor
from torch.autograd import forward_ad
from written_out import stick_breaking

from sbeval.attention import stickbreaking_attention


@pytest.mark.parametrize("attend_current", [False, True], ids=["strict", "current"])
def test_reference_is_the_definition_written_as_loops(attend_current):
    p = problem(heads=2, groups=1, queries=4, keys=6, head_dim=3)
    found = stickbreaking_attention(p.q, p.k, p.v, scale=0.7, attend_current=attend_current, impl="reference")
    q_LHD = torch.cat([torch.zeros_like(p.q[0, :, :2]), p.q[0]], dim=1).transpose(0, 1)  # two older rows
    k_LHD, v_LHD = (x[0].expand(2, -1, -1).transpose(0, 1) for x in (p.k, p.v))
    heads_LHD, stick_LH1 = stick_breaking(q_LHD, k_LHD, v_LHD, 0.7, attend_current=attend_current)
    torch.testing.assert_close(found.output[0], heads_LHD[2:].transpose(0, 1))
    torch.testing.assert_close(found.remainder[0], stick_LH1[2:, :, 0].T)


CALLS: dict[str, dict[str, Any]] = {
    "strict": {},
    "current": {"attend_current": True},
    "padded": {"seq_start": torch.tensor([2], device=DEVICE)},
    "packed": {"cu_seqlens": torch.tensor([0, 3, 7], dtype=torch.int32, device=DEVICE)},
}


@pytest.mark.parametrize("impl", ["reference", "blockwise"])
@pytest.mark.parametrize("call", CALLS)
def test_gradients_pass_gradcheck(impl, call, monkeypatch):
    monkeypatch.setattr("sbeval.attention.impl.tiles.TILE_ROWS", 4)
    monkeypatch.setattr("sbeval.attention.impl.tiles.TILE_LOGITS", 12)
    p = problem(heads=2, groups=1, queries=7 if call == "packed" else 5, keys=7, head_dim=3)
    inputs = [tensor.clone().requires_grad_() for tensor in (p.q, p.k, p.v)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return stickbreaking_attention(q, k, v, impl=impl, **CALLS[call])

    assert torch.autograd.gradcheck(attend, inputs)


def test_the_definition_has_forward_mode_derivatives():
    p = problem(queries=9)
    tangents = (p.d_output, torch.ones_like(p.k), p.v.flip(0))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stickbreaking_attention(q, k, v, impl="reference").output

    _, found = torch.func.jvp(attend, (p.q, p.k, p.v), tangents)
    step = 1e-6
    ahead, behind = (
        attend(*(x + side * dx for x, dx in zip((p.q, p.k, p.v), tangents, strict=True))) for side in (step, -step)
    )
    torch.testing.assert_close(found, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_forward_mode_derivative_that_does_not_exist_is_refused_and_not_zero(impl, which):
    p = problem(queries=9, dtype=torch.float32)
    inputs = {name: getattr(p, name) for name in "qkv"}

    def attend(changed: Tensor) -> Tensor:
        return stickbreaking_attention(**{**inputs, which: changed}, impl=impl).output

    with pytest.raises(ValueError, match="has a forward-mode tangent"):
        torch.func.jvp(attend, (inputs[which],), (torch.ones_like(inputs[which]),))
    with forward_ad.dual_level():
        assert torch.equal(attend(inputs[which]), attend(inputs[which]))
        with pytest.raises(ValueError, match="has a forward-mode tangent"):
            attend(forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which])))


# a single query without a gradient takes the decode kernels, whatever its dtype
WAYS = [
    pytest.param("reference", torch.float32, False, id="reference"),
    pytest.param("blockwise", torch.float32, False, id="blockwise"),
    pytest.param("triton", torch.float32, False, id="decode"),
    pytest.param("triton", torch.float32, True, id="triton-fp32"),
    pytest.param("triton", torch.float16, True, id="triton-fp16"),
]


def weights_of(p: Problem, impl: str, differentiable: bool) -> Tensor:
    """The weights themselves [keys], for one query: each value is a unit vector of its own."""
    keys = p.k.shape[2]
    one_hot = torch.eye(keys, dtype=p.q.dtype, device=DEVICE)[None, None]
    assert p.q.shape[3] == keys
    q = p.q.clone().requires_grad_(differentiable)
    return stickbreaking_attention(q, p.k, one_hot, attend_current=True, impl=impl).output[0, 0, 0].detach()


@pytest.mark.parametrize(("impl", "dtype", "differentiable"), WAYS)
@pytest.mark.parametrize("logit", [-9.0, -0.3, 0.0, 2.0, 40.0])
def test_equal_logits_give_the_newer_key_at_least_the_older_ones_weight(impl, dtype, differentiable, logit):
    p = problem(heads=1, queries=1, keys=70, head_dim=70, dtype=dtype)
    p.q.fill_(logit / 70**0.5)
    weights = weights_of(dataclasses.replace(p, k=torch.ones_like(p.k)), impl, differentiable)
    # fewer factors make the newer weight, rounded another way
    slack = weights[1:] * torch.finfo(dtype).eps if differentiable else 0
    assert (weights.diff() >= -slack).all()
    assert weights[-1] > 0


IMPLEMENTATIONS = ["reference", "blockwise", "triton"]
ROWS = 50
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float16)}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("size", [1e2, 3e4], ids=["1e4", "inf"])
@pytest.mark.parametrize("skip_threshold", [None, 1e-3], ids=["plain", "skip"])
def test_extreme_logits_take_all_or_nothing(impl, dtype, size, skip_threshold):
    p = problem(queries=2, keys=700, dtype=dtype)  # for which the decode kernels run
    options = {"scale": 1.0, "impl": impl, "skip_threshold": skip_threshold}
    p.q.fill_(size)
    large = size if dtype == torch.float16 or size < 1e3 else 3e38
    p.k.fill_(-large)
    nothing = stickbreaking_attention(p.q, p.k, p.v, **options)
    assert (nothing.output == 0).all()
    assert (nothing.remainder == 1).all()
    for chosen in (40, 690):  # in the oldest split of decoding and in the newest
        p.k[:, :, chosen] = large
        found = stickbreaking_attention(p.q, p.k, p.v, **options)
        torch.testing.assert_close(found.output, p.v[:, :, chosen, None].expand_as(found.output))
        assert (found.remainder < 1e-30).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("size", [1e2, 3e4], ids=["1e4", "inf"])
def test_where_all_logits_are_huge_each_row_takes_its_newest_key(impl, dtype, size):
    p = problem(heads=1, queries=70, dtype=dtype)
    p.q.fill_(size)
    p.k.fill_(size if dtype == torch.float16 or size < 1e3 else 3e38)
    found = stickbreaking_attention(p.q, p.k, p.v, scale=1.0, impl=impl)
    torch.testing.assert_close(found.output[:, :, 1:], p.v[:, :, :-1])
    assert (found.remainder[:, :, 1:] < 1e-30).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("sign", [1.0, -1.0, None], ids=["all-huge", "all-tiny", "mixed"])
def test_gradients_of_extreme_logits_are_finite(impl, sign):
    p = problem(heads=1, queries=70, dtype=torch.float32)
    p.q.fill_(100.0)
    p.k.copy_(100.0 * (p.k.sign() if sign is None else torch.full_like(p.k, sign)))
    found = outputs_and_gradients(p, impl=impl, scale=0.1)
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name
    if sign is not None:
        assert (found["dq"] == 0).all()
        assert (found["dk"] == 0).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("skip_threshold", [None, 1e-3], ids=["plain", "skip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_a_query_that_is_not_a_number_stays_so_and_spoils_no_other_row(impl, dtype, skip_threshold):
    p = problem(heads=1, queries=ROWS, dtype=dtype)
    clean = outputs_and_gradients(p, impl=impl, skip_threshold=skip_threshold)
    p.q[:, :, 30] = torch.nan
    found = outputs_and_gradients(p, impl=impl, skip_threshold=skip_threshold)
    others = [row for row in range(ROWS) if row != 30]
    for name in ("output", "remainder", "dq"):
        assert found[name][0, 0, 30].isnan().all(), name
        # products of eight keys at once, or key by key in a block that walks again, round differently
        torch.testing.assert_close(
            found[name][:, :, others], clean[name][:, :, others], rtol=8 * EPS[dtype], atol=max(1e-5, EPS[dtype])
        )


@pytest.mark.parametrize(
    ("impl", "queries", "keys", "skip_threshold"),
    [*((impl, ROWS, ROWS, None) for impl in IMPLEMENTATIONS), *(("triton", 3, 600, skip) for skip in (None, 1e-3))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_what_is_not_a_number_spoils_the_rows_that_see_it_alone(impl, queries, keys, skip_threshold, dtype):
    p = problem(heads=2, queries=queries, keys=keys, dtype=dtype, logit_scale=0.1 if keys > queries else 1.0)
    options = {"impl": impl, "skip_threshold": skip_threshold}
    clean = stickbreaking_attention(p.q, p.k, p.v, **options)
    p.k[:, :, keys - 2], p.q[:, 1, queries // 3] = torch.nan, torch.nan
    found = stickbreaking_attention(p.q, p.k, p.v, **options)
    spoiled = torch.zeros(2, queries, dtype=torch.bool, device=DEVICE)
    spoiled[:, -1], spoiled[1, queries // 3] = True, True
    for after, before in zip(found, clean, strict=True):
        assert after[0, spoiled].isnan().all()
        torch.testing.assert_close(after[0, ~spoiled], before[0, ~spoiled])


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("logit", [12.0, 25.0, 60.0])
def test_a_few_large_logits_among_small_ones_are_right(impl, logit):
    # products of eight 1 + e overflow fp32 in some rows and not in others
    p = problem(heads=1, queries=150, dtype=torch.float16, logit_scale=0.2)
    p.q[..., 0] = 4.0
    p.k[..., 0] = -6.0
    p.k[:, :, 40:49, 0] = logit
    p.k[:, :, 90, 0] = logit
    exact = outputs_and_gradients(p.to(torch.float64), impl="reference")
    torch.testing.assert_close(outputs_and_gradients(p, impl=impl), exact, atol=6e-3, rtol=6e-3, check_dtype=False)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("attend_current", [False, True], ids=["strict", "current"])
@pytest.mark.parametrize(
    ("rows", "large", "small"), [(40, 25.0, -25.0), (40, 5.0, -25.0), (22, 25.0, 0.0)], ids=["inf", "product", "masked"]
)
def test_infinity_times_nothing_is_no_gap_in_the_weights(impl, attend_current, rows, large, small):
    # 2^logit of two neighbours, or the product of both, is infinite; it is 0 of all others, or of masked keys alone
    p = problem(heads=1, queries=rows, dtype=torch.float16)
    p.q.fill_(1.0)
    p.k.fill_(small)
    p.k[:, :, 20:22] = large
    exact = outputs_and_gradients(p.to(torch.float64), impl="reference", scale=1.0, attend_current=attend_current)
    found = outputs_and_gradients(p, impl=impl, scale=1.0, attend_current=attend_current)
    torch.testing.assert_close(found, exact, atol=4e-3, rtol=4e-3, check_dtype=False)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_a_long_row_of_keys_with_one_logit_leaves_as_much_of_the_stick_as_the_formula_says(impl):
    # 1 + e of such keys rounds in one direction, thousands of times
    keys, dtype = 16384, torch.float32 if impl == "blockwise" else torch.float16
    q = torch.full((1, 1, 1, 16), 2.0, dtype=dtype, device=DEVICE, requires_grad=True)
    k = torch.full((1, 1, keys, 16), -2.0, dtype=dtype, device=DEVICE)
    found = stickbreaking_attention(q, k, k, scale=0.14, impl=impl)
    left = math.exp(-(keys - 1) * math.log1p(math.exp(-64 * 0.14)))
    # with 1 + e rounded for every key it would be 1e-3 off
    assert found.remainder.item() == pytest.approx(left, rel=1e-4)
