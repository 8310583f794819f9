"""Which program computes which rows, and when the forward kernel tests the sticks; no result shows either."""

import dataclasses
import math

import pytest
import torch
import triton
import triton.language as tl
from attention_problems import DEVICE, Problem, problem
from torch import Tensor

from sbeval.attention.impl.triton import forward as kernels
from sbeval.attention.impl.triton.forward import _next_chunk, forward
from sbeval.attention.impl.triton.launch import (
    PROGRAMS_TOGETHER,
    ROOMY_CACHE_BYTES,
    backward_programs_together,
    forward_parameters,
    heads_at_once,
)
from sbeval.attention.impl.triton.primitives import place
from tests.marks import exhaustive

MOST = 64
SMALLEST = 2.0**-126


@triton.jit
def _chunks(found_ptr, chunk_ptr, steps_ptr, before_ptr, left_ptr, threshold, cases, CHUNK: tl.constexpr):
    case = tl.arange(0, 1024)
    inside = case < cases
    chunk, steps = tl.load(chunk_ptr + case, mask=inside, other=2), tl.load(steps_ptr + case, mask=inside, other=2)
    before, left = tl.load(before_ptr + case, mask=inside, other=1.0), tl.load(left_ptr + case, mask=inside, other=1.0)
    tl.store(found_ptr + case, _next_chunk(chunk, steps, before, left, threshold, CHUNK), mask=inside)


def next_chunks(cases: list[tuple[int, int, float, float]], threshold: float) -> list[int]:
    chunk, steps, before, left = zip(*cases, strict=True)
    counts = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (chunk, steps))
    sticks = (torch.tensor(each, dtype=torch.float32, device=DEVICE) for each in (before, left))
    found = torch.zeros(len(cases), dtype=torch.int32, device=DEVICE)
    _chunks[(1,)](found, *counts, *sticks, threshold, len(cases), MOST)
    return [int(number) for number in found]


@pytest.mark.parametrize("threshold", [0.0, 1e-45, SMALLEST, 1e-5, 0.5, 1 - 2**-24])
def test_the_next_look_is_two_tiles_away_at_least_and_twice_as_far_as_before_at_most(threshold: float) -> None:
    sticks = [1.0, 1 + 2**-20, 0.7, 1e-3, 1e-30, SMALLEST, 1e-42, 0.0, -1.0, math.nan, math.inf]
    cases = [
        (chunk, steps, before, left)
        for chunk in (2, 3, 7, 64)
        for steps in (1, chunk)
        for before in sticks[:-3]
        for left in sticks
    ]
    for (chunk, *_), found in zip(cases, next_chunks(cases, threshold), strict=True):
        assert 2 <= found <= min(2 * chunk, MOST)


def test_the_next_look_comes_after_half_the_tiles_that_would_spend_the_stick() -> None:
    # ten tiles take ten powers of two of the stick; thirty more remain
    assert next_chunks([(32, 10, 1.0, 2.0**-10)], 2.0**-40) == [15]
    assert next_chunks([(4, 10, 1.0, 2.0**-10)], 2.0**-40) == [8]
    # if no share is taken, or every key is visited, sticks are tested as rarely as possible
    assert next_chunks([(32, 10, 1.0, 1.0), (64, 10, 1.0, 1.0)], 2.0**-40) == [64, 64]
    assert next_chunks([(32, 10, 1.0, 2.0**-10)], 0.0) == [64]
    assert next_chunks([(32, 10, 2.0**-39, 2.0**-40)], 2.0**-40) == [2]


def breaking_slowly(dtype: torch.dtype, each: float) -> Problem:
    """Returns a problem in which every key of a head takes the same share of the stick."""
    p = problem(heads=2, groups=1, queries=40, keys=600, dtype=dtype, logit_scale=0.01)
    p.q[..., 0], p.k[..., 0] = 4.0, math.log(each)
    p.q[:, 1, :, 0] *= 2
    return p


def launched(p: Problem, threshold: float, starts: dict[str, Tensor], *, save: bool) -> tuple[Tensor, ...]:
    arguments = {"seq_start": None, "row_start": None, **starts}
    return forward(p.q, p.k, p.v, p.q.shape[-1] ** -0.5, False, **arguments, threshold=threshold, save=save)


STARTS = {
    "plain": {},
    "padded": {"seq_start": torch.tensor([130], device=DEVICE)},
    "nothing inside": {"seq_start": torch.tensor([600], device=DEVICE)},
    "packed": {"row_start": torch.full((40,), 130, dtype=torch.int32, device=DEVICE)},
    "boundary": {"row_start": torch.tensor([0] * 30 + [590] * 10, dtype=torch.int32, device=DEVICE)},
}

# the start of a text does not depend on rounding
ROUNDINGS = [*((torch.float32, starts) for starts in STARTS), (torch.float16, "plain")]


@pytest.mark.parametrize(("dtype", "starts"), ROUNDINGS)
@pytest.mark.parametrize("save", [False, True], ids=["inference", "training"])
def test_off_gives_bitwise_what_a_visit_of_every_key_gives(dtype: torch.dtype, starts: str, save: bool) -> None:
    p = breaking_slowly(dtype, 0.4)
    p.q[..., 0] *= 4
    p.k[:, :, ::2, 0] *= -1  # sticks are spent within about a hundred keys
    stopped = launched(p, SMALLEST, STARTS[starts], save=save)
    everything = launched(p, 0.0, STARTS[starts], save=save)
    torch.testing.assert_close(stopped[:2], everything[:2], rtol=0, atol=0)
    if save and starts == "plain":
        assert (everything[3] == 0).all()
        assert (stopped[3] > 0).any(), "nothing was skipped"


@pytest.mark.parametrize(("dtype", "starts"), [ROUNDINGS[0], *exhaustive(*ROUNDINGS[1:-1]), ROUNDINGS[-1]])
def test_how_often_the_kernel_looks_changes_what_is_left_by_less_than_the_threshold(
    dtype: torch.dtype, starts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = breaking_slowly(dtype, 0.03)
    exact = launched(p, 0.0, STARTS[starts], save=True)
    for chunk in (2, 64):

        def chosen(*, chunk: int = chunk, **options: int) -> object:
            return dataclasses.replace(forward_parameters(**options), chunk_tiles=chunk)

        monkeypatch.setattr(kernels, "forward_parameters", chosen)
        found = launched(p, 1e-2, STARTS[starts], save=True)
        rounding = 4 * torch.finfo(dtype).eps
        assert (found[0] - exact[0]).abs().max() <= 1e-2 * p.v.abs().max() + rounding
        assert (found[1] - exact[1]).abs().max() <= 1e-2 + rounding
        assert (found[3] >= exact[3]).all()
        if starts != "nothing inside":
            assert (found[3] > exact[3]).any(), "nothing was skipped"


@triton.jit
def _places(found_ptr, blocks, all_heads, together):
    block, head = place(blocks, all_heads, together)
    tl.store(found_ptr + tl.program_id(0) * 2, block)
    tl.store(found_ptr + tl.program_id(0) * 2 + 1, head)


@pytest.mark.parametrize(("blocks", "heads"), [(1, 1), (1, 7), (5, 1), (4, 6), (3, 7)])
@pytest.mark.parametrize("together", [1, 2, 4, 100])
def test_every_block_of_a_head_has_one_program_and_long_rows_come_first(blocks: int, heads: int, together: int) -> None:
    found = torch.zeros(blocks * heads, 2, dtype=torch.int32, device=DEVICE)
    _places[(blocks * heads,)](found, blocks, heads, together)
    places = [(block, head) for block, head in found.tolist()]
    assert sorted(places) == [(block, head) for block in range(blocks) for head in range(heads)]
    for first in range(0, heads, together):
        group = [place for place in places if first <= place[1] < first + together]
        assert places.index(group[-1]) - places.index(group[0]) == len(group) - 1
        assert [block for block, _ in group] == sorted((block for block, _ in group), reverse=True)


def test_as_many_heads_go_together_as_fit_half_the_cache_and_fill_the_machine() -> None:
    many = PROGRAMS_TOGETHER
    assert heads_at_once(heads=20, bytes_a_head=1_000_000, blocks=many, cache_bytes=10_000_000) == 5
    assert heads_at_once(heads=20, bytes_a_head=10**9, blocks=many, cache_bytes=10_000_000) == 1
    assert heads_at_once(heads=20, bytes_a_head=10**9, blocks=many // 4, cache_bytes=10_000_000) == 4
    assert heads_at_once(heads=20, bytes_a_head=0, blocks=1, cache_bytes=0) == 20


def test_the_backward_pass_works_on_fewer_heads_at_once_where_the_cache_is_small() -> None:
    def together(cache_bytes: int, *, num_warps: int, block_queries: int, head_dim: int) -> int:
        programs = backward_programs_together(num_warps=num_warps, cache_bytes=cache_bytes)
        sizes = {"bytes_a_head": 12 * 16384 * head_dim, "blocks": 16384 // block_queries}
        return heads_at_once(heads=16, cache_bytes=cache_bytes, programs=programs, **sizes)

    narrow, wide = (
        {"num_warps": 4, "block_queries": 64, "head_dim": 64},
        {"num_warps": 8, "block_queries": 128, "head_dim": 128},
    )
    assert [together(ROOMY_CACHE_BYTES, **shape) for shape in (narrow, wide)] == [8, 16]
    assert [together(50 * 2**20, **shape) for shape in (narrow, wide)] == [4, 4]


def test_no_round_has_few_heads_left() -> None:
    assert heads_at_once(heads=16, bytes_a_head=1_000_000, blocks=PROGRAMS_TOGETHER, cache_bytes=30_000_000) == 16
    assert heads_at_once(heads=16, bytes_a_head=1_000_000, blocks=PROGRAMS_TOGETHER, cache_bytes=20_000_000) == 8
