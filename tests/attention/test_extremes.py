"""Logits too large for any dtype, and numbers that are none."""

import math

import pytest
import torch
from attention_problems import DEVICE, outputs_and_gradients, problem

from sbeval.attention import stickbreaking_attention

IMPLEMENTATIONS = ["reference", "blockwise", "triton"]
ROWS = 50
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float16)}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("size", [1e2, 3e4], ids=["1e4", "inf"])
@pytest.mark.parametrize("skip_threshold", [None, 1e-3], ids=["plain", "skip"])
def test_extreme_logits_take_all_or_nothing(
    impl: str, dtype: torch.dtype, size: float, skip_threshold: float | None
) -> None:
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
def test_where_all_logits_are_huge_each_row_takes_its_newest_key(impl: str, dtype: torch.dtype, size: float) -> None:
    p = problem(heads=1, queries=70, dtype=dtype)
    p.q.fill_(size)
    p.k.fill_(size if dtype == torch.float16 or size < 1e3 else 3e38)
    found = stickbreaking_attention(p.q, p.k, p.v, scale=1.0, impl=impl)
    torch.testing.assert_close(found.output[:, :, 1:], p.v[:, :, :-1])
    assert (found.remainder[:, :, 1:] < 1e-30).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("sign", [1.0, -1.0, None], ids=["all-huge", "all-tiny", "mixed"])
def test_gradients_of_extreme_logits_are_finite(impl: str, sign: float | None) -> None:
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
def test_a_query_that_is_not_a_number_stays_so_and_spoils_no_other_row(
    impl: str, dtype: torch.dtype, skip_threshold: float | None
) -> None:
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
def test_what_is_not_a_number_spoils_the_rows_that_see_it_alone(
    impl: str, queries: int, keys: int, skip_threshold: float | None, dtype: torch.dtype
) -> None:
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
def test_a_few_large_logits_among_small_ones_are_right(impl: str, logit: float) -> None:
    # products of eight 1 + e overflow fp32 in some rows and not in others
    p = problem(heads=1, queries=150, dtype=torch.float16, logit_scale=0.2)
    p.q[..., 0] = 4.0
    p.k[..., 0] = -6.0
    p.k[:, :, 40:49, 0] = logit
    p.k[:, :, 90, 0] = logit
    exact = outputs_and_gradients(p.to(torch.float64), impl="reference")
    found = outputs_and_gradients(p, impl=impl)
    torch.testing.assert_close(found, exact, atol=6e-3, rtol=6e-3, check_dtype=False)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("attend_current", [False, True], ids=["strict", "current"])
@pytest.mark.parametrize(
    ("rows", "large", "small"), [(40, 25.0, -25.0), (40, 5.0, -25.0), (22, 25.0, 0.0)], ids=["inf", "product", "masked"]
)
def test_infinity_times_nothing_is_no_gap_in_the_weights(
    impl: str, attend_current: bool, rows: int, large: float, small: float
) -> None:
    # 2^logit of two neighbours, or the product of both, is infinite; it is 0 of all others, or of masked keys alone
    p = problem(heads=1, queries=rows, dtype=torch.float16)
    p.q.fill_(1.0)
    p.k.fill_(small)
    p.k[:, :, 20:22] = large
    exact = outputs_and_gradients(p.to(torch.float64), impl="reference", scale=1.0, attend_current=attend_current)
    found = outputs_and_gradients(p, impl=impl, scale=1.0, attend_current=attend_current)
    torch.testing.assert_close(found, exact, atol=4e-3, rtol=4e-3, check_dtype=False)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_a_long_row_of_keys_with_one_logit_leaves_as_much_of_the_stick_as_the_formula_says(impl: str) -> None:
    # 1 + e of such keys rounds in one direction, thousands of times
    keys, dtype = 16384, torch.float32 if impl == "blockwise" else torch.float16
    q = torch.full((1, 1, 1, 16), 2.0, dtype=dtype, device=DEVICE, requires_grad=True)
    k = torch.full((1, 1, keys, 16), -2.0, dtype=dtype, device=DEVICE)
    found = stickbreaking_attention(q, k, k, scale=0.14, impl=impl)
    left = math.exp(-(keys - 1) * math.log1p(math.exp(-64 * 0.14)))
    # with 1 + e rounded for every key it would be 1e-3 off
    assert found.remainder.item() == pytest.approx(left, rel=1e-4)
