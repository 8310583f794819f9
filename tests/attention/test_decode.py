"""A few queries against many keys: the decode kernels, whose splits of the keys must not show in the result."""

import dataclasses
import math

import pytest
import torch
from attention_problems import DEVICE, Problem, assert_within_budget, largest_logit, problem, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sbeval.attention import stickbreaking_attention
from sbeval.attention.impl.triton.decode import MOST_SPLITS, DecodeParameters, decode, decode_parameters, suits_decode
from tests.marks import exhaustive

EXACT_STOP = -150.0


def parameters(p: Problem, *, splits: int, first_splits: int | None = None, chunk_tiles: int = 2) -> DecodeParameters:
    chosen = decode_parameters(
        rows=p.q.shape[1] // p.k.shape[1] * p.q.shape[2], keys=p.k.shape[2], head_dim=p.q.shape[3],
        element_bytes=p.q.element_size(), key_heads=p.k.shape[0] * p.k.shape[1], multiprocessors=132, skipping=False,
    )  # fmt: skip
    first = splits if first_splits is None else first_splits
    return dataclasses.replace(chosen, block_keys=16, splits=splits, first_splits=first, chunk_tiles=chunk_tiles)


def decoded(
    p: Problem,
    launch: DecodeParameters,
    *,
    attend_current: bool = False,
    seq_start: Tensor | None = None,
    log2_threshold: float = EXACT_STOP,
    skipping: bool = False,
) -> tuple[Tensor, Tensor]:
    scale = p.q.shape[-1] ** -0.5
    return decode(
        p.q, p.k, p.v, scale, attend_current, seq_start, log2_threshold, skipping=skipping, parameters=launch
    )  # fmt: skip


def breaking_slowly(**shape: int) -> Problem:
    """Some 5 % of the stick a key: thresholds are reached after some hundred keys."""
    p = problem(**shape, dtype=torch.float32, logit_scale=0.2)  # type: ignore[arg-type]
    p.q[..., 0], p.k[..., 0] = 3.0, -3.0
    p.q[..., 1], p.k[..., 1] = 1.0, -1.0
    return p


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("attend_current", [False, True], ids=["strict", "current"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"queries": 1, "keys": 600, "heads": 8, "groups": 1, "logit_scale": 0.1}, id="8heads-share-a-key"),
        pytest.param(
            {"queries": 3, "keys": 577, "heads": 4, "groups": 2, "batch": 2, "head_dim": 50}, id="3of577-dim50"
        ),
        pytest.param({"queries": 1, "keys": 530, "heads": 2, "groups": 2, "head_dim": 80}, id="1of530-dim80"),
    ],
)
def test_the_public_function_decodes_within_the_budget(shape: dict, attend_current: bool, dtype: torch.dtype) -> None:
    low = problem(**shape, dtype=dtype)
    assert suits_decode(low.q, low.k)
    exact, rounded, found = (
        stickbreaking_attention(p.q, p.k, p.v, attend_current=attend_current, impl=impl)
        for p, impl in ((low.to(torch.float64), "reference"), (low, "reference"), (low, "triton"))
    )
    for name in ("output", "remainder"):
        values = [getattr(result, name) for result in (found, exact, rounded)]
        values[2] = values[2].to(values[0].dtype)
        assert_within_budget(*values, name, largest_logit=largest_logit(low), dtype=dtype)


@given(
    keys=st.integers(1, 150), queries=st.integers(1, 5), splits=st.integers(1, 11), first_splits=st.integers(1, 11),
    starts=st.lists(st.integers(0, 150), min_size=2, max_size=2), attend_current=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=10, deadline=None)
def test_however_the_keys_are_split_the_result_is_the_references_and_padding_is_not_read(
    keys: int, queries: int, splits: int, first_splits: int, starts: list[int], attend_current: bool, seed: int
) -> None:
    queries = min(queries, keys)
    p = problem(batch=2, queries=queries, keys=keys, dtype=torch.float32, logit_scale=0.5, seed=seed)
    seq_start = torch.tensor([min(start, keys) for start in starts], device=DEVICE)
    exact = stickbreaking_attention(
        p.q.double(), p.k.double(), p.v.double(), attend_current=attend_current, seq_start=seq_start, impl="reference"
    )
    for row, start in enumerate(seq_start.tolist()):
        p.k[row, :, :start], p.v[row, :, :start] = torch.nan, torch.nan
    launch = parameters(p, splits=splits, first_splits=min(first_splits, splits))
    output, remainder = decoded(p, launch, attend_current=attend_current, seq_start=seq_start)
    assert relative_error(output, exact.output) < 1e-5
    torch.testing.assert_close(remainder.double(), exact.remainder, rtol=1e-4, atol=1e-30)


def test_the_exact_stop_changes_no_bit() -> None:
    p = problem(queries=2, keys=400, dtype=torch.float32, logit_scale=2.0)
    launch = parameters(p, splits=5, first_splits=1)
    everything = decoded(p, launch, log2_threshold=-math.inf)
    for skipping in (False, True):
        stopped = decoded(p, launch, log2_threshold=EXACT_STOP, skipping=skipping)
        torch.testing.assert_close(stopped, everything, rtol=0, atol=0)
    assert (everything[1] == 0).all(), "no stick was spent"


@pytest.mark.parametrize("threshold", [1e-3, *exhaustive(1e-1, 1e-5)])
def test_skipping_stays_within_its_bound_whatever_a_split_saw_of_newer_ones(threshold: float) -> None:
    p = breaking_slowly(queries=2, keys=700)
    exact = stickbreaking_attention(p.q.double(), p.k.double(), p.v.double(), impl="reference")
    launch = parameters(p, splits=15, first_splits=2)
    everything = decoded(p, launch)
    aware = decoded(p, launch, log2_threshold=math.log2(threshold), skipping=True)
    unaware = decoded(p, launch, log2_threshold=math.log2(threshold), skipping=False)
    torch.testing.assert_close(aware, unaware, rtol=0, atol=0)
    assert (aware[0] - exact.output).abs().max() <= threshold * p.v.abs().max() + 1e-5
    assert (aware[1] - exact.remainder).abs().max() <= threshold + 1e-6
    assert not torch.equal(aware[1], everything[1]), "nothing was skipped"


def test_splits_that_newer_ones_decide_read_nothing() -> None:
    p = breaking_slowly(queries=1, keys=800)
    launch = parameters(p, splits=10, first_splits=5)
    found = decoded(p, launch, log2_threshold=math.log2(1e-3), skipping=True)
    p.k[:, :, :240], p.v[:, :, :240] = torch.nan, torch.nan
    again = decoded(p, launch, log2_threshold=math.log2(1e-3), skipping=True)
    torch.testing.assert_close(again, found, rtol=0, atol=0)


@pytest.mark.parametrize("left_behind", [math.nan, *exhaustive(1e30, -3e38)])
@pytest.mark.parametrize("skipping", [False, True])
def test_what_memory_held_is_in_no_result(skipping: bool, left_behind: float, monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.full
    monkeypatch.setattr(torch, "empty", lambda shape, **options: full(shape, left_behind, **options))
    for seed in range(3):
        p = problem(queries=1, keys=200, heads=2, groups=1, dtype=torch.float32, logit_scale=4.0, seed=seed)
        exact = stickbreaking_attention(p.q.double(), p.k.double(), p.v.double(), impl="reference")
        for first_splits in (1, 3):  # where they spend the stick, older ones give up
            launch = parameters(p, splits=4, first_splits=first_splits)
            found = decoded(p, launch, log2_threshold=math.log2(1e-5), skipping=skipping)
            assert relative_error(found[0].double(), exact.output) < 1e-3


def test_a_view_of_a_longer_cache_gives_the_same_bits() -> None:
    p = problem(queries=1, keys=540, heads=4, groups=2, dtype=torch.float32)
    expected = stickbreaking_attention(p.q, p.k, p.v, impl="triton")
    cache = torch.full((2, 1, 900, 2, 16), torch.nan, dtype=torch.float32, device=DEVICE)
    for place, tensor in zip(cache, (p.k, p.v), strict=True):
        place[:, 100:640] = tensor.transpose(1, 2)
    k, v = (place[:, 100:640].transpose(1, 2) for place in cache)
    torch.testing.assert_close(stickbreaking_attention(p.q, k, v, impl="triton"), expected, rtol=0, atol=0)


@given(
    rows=st.integers(1, 16), keys=st.integers(1, 2_000_000), head_dim=st.integers(1, 256),
    key_heads=st.integers(1, 4096), element_bytes=st.sampled_from([2, 4]), skipping=st.booleans(),
)  # fmt: skip
def test_launch_parameters_cover_the_problem_and_fit_a_gpu(
    rows: int, keys: int, head_dim: int, key_heads: int, element_bytes: int, skipping: bool
) -> None:
    launch = decode_parameters(
        rows=rows, keys=keys, head_dim=head_dim, element_bytes=element_bytes, key_heads=key_heads, multiprocessors=132,
        skipping=skipping,
    )  # fmt: skip
    for size in (launch.block_rows, launch.block_keys, launch.block_head_dim):
        assert size >= 16
        assert size & (size - 1) == 0
    assert launch.block_rows >= rows
    assert launch.block_head_dim >= head_dim
    assert 1 <= launch.first_splits <= launch.splits <= MOST_SPLITS
    assert launch.splits <= -(-keys // launch.block_keys)
    buffers_bytes = launch.num_stages * 2 * launch.block_keys * launch.block_head_dim * element_bytes
    assert buffers_bytes <= 160 * 1024
