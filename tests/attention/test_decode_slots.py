"""The newest positions of texts against keys in slots: the lengths must show, and how the keys are split must not."""

import dataclasses
import math

import pytest
import torch
from attention_problems import DEVICE, Problem, problem, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sbeval.attention import StickBreakingOutput, stickbreaking_attention, stickbreaking_decode
from sbeval.attention.impl.triton.decode_slots import SlotParameters, decode_slots, slot_parameters
from tests.marks import exhaustive

EXACT_STOP = -150.0


def launch(p: Problem, **changes: int) -> SlotParameters:
    chosen = slot_parameters(
        rows=p.q.shape[1] // p.k.shape[1] * p.q.shape[2], room=p.k.shape[2], head_dim=p.q.shape[3],
        element_bytes=p.q.element_size(), key_heads=p.k.shape[0] * p.k.shape[1], multiprocessors=132, skipping=True,
    )  # fmt: skip
    return dataclasses.replace(chosen, **{"block_keys": 16, "chunk_tiles": 2, "fewest_tiles": 1, **changes})


def one_by_one(p: Problem, lengths: list[int], **options: object) -> list[StickBreakingOutput]:
    """The definition, on each slot's own keys."""
    return [
        stickbreaking_attention(
            p.q[[slot]], p.k[[slot], :, :length], p.v[[slot], :, :length], impl="reference", **options
        )
        for slot, length in enumerate(lengths)
    ]


def on_device(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


@pytest.mark.exhaustive
@given(
    lengths=st.lists(st.integers(5, 140), min_size=1, max_size=3), queries=st.integers(1, 5), splits=st.integers(1, 9),
    first_splits=st.integers(1, 9), fewest_tiles=st.integers(1, 3), shared=st.integers(1, 3),
    attend_current=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_however_the_keys_are_split_each_slot_has_the_result_of_its_own_keys(
    lengths: list[int], queries: int, splits: int, first_splits: int, fewest_tiles: int, shared: int,
    attend_current: bool, seed: int,
) -> None:  # fmt: skip
    p = problem(
        batch=len(lengths), heads=2 * shared, groups=2, queries=queries, keys=140, dtype=torch.float32,
        logit_scale=0.5, seed=seed,
    )  # fmt: skip
    chosen = launch(p, splits=splits, first_splits=min(first_splits, splits), fewest_tiles=fewest_tiles)
    scale = p.q.shape[-1] ** -0.5
    found = decode_slots(p.q, p.k, p.v, on_device(lengths), scale, attend_current, EXACT_STOP, parameters=chosen)
    for slot, exact in enumerate(one_by_one(p.to(torch.float64), lengths, attend_current=attend_current)):
        torch.testing.assert_close(found[0][slot].double(), exact.output[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1][slot].double(), exact.remainder[0], rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("impl", ["blockwise", "triton"])
def test_the_public_function_sees_no_key_beyond_a_slot_s_length(impl: str) -> None:
    p = problem(batch=2, heads=4, groups=2, queries=1, keys=70, dtype=torch.float32, logit_scale=0.5)
    found = stickbreaking_decode(p.q, p.k, p.v, on_device([33, 1]), scale=0.25, impl=impl)  # type: ignore[arg-type]
    p.k[0, :, 33:], p.v[0, :, 33:] = 7.0, 7.0
    again = stickbreaking_decode(p.q, p.k, p.v, on_device([33, 1]), scale=0.25, impl=impl)  # type: ignore[arg-type]
    assert torch.equal(found.output, again.output)
    assert not found.output[1].any(), "a first token has nothing to see"
    assert (found.remainder[1] == 1).all()
    for slot, exact in enumerate(one_by_one(p, [33, 1], scale=0.25)):
        torch.testing.assert_close(found.output[slot], exact.output[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("left_behind", [math.nan, *exhaustive(1e30, -3e38)])
def test_what_memory_held_is_in_no_result(left_behind: float, monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.full
    monkeypatch.setattr(torch, "empty", lambda shape, **options: full(shape, left_behind, **options))
    for seed in range(5):
        p = problem(batch=1, heads=1, groups=1, queries=1, keys=200, dtype=torch.float32, logit_scale=4.0, seed=seed)
        scale = p.q.shape[-1] ** -0.5
        (exact,) = one_by_one(p.to(torch.float64), [200], scale=scale)
        for first_splits in (1, 2, 3):  # where they spend the stick, older ones give up
            chosen = launch(p, splits=4, first_splits=first_splits)
            found = decode_slots(p.q, p.k, p.v, on_device([200]), scale, False, math.log2(1e-5), parameters=chosen)
            assert relative_error(found[0].double(), exact.output) < 1e-3


@pytest.mark.parametrize("threshold", [EXACT_STOP, math.log2(1e-4)], ids=["exact", "skip"])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("place", [20, 700])
def test_a_key_that_is_not_a_number_spoils_every_row_that_sees_it(place: int, heads: int, threshold: float) -> None:
    p = problem(batch=2, heads=heads, groups=1, queries=1, keys=720, dtype=torch.float32, logit_scale=0.1)
    p.k[..., 0], p.q[..., 0] = -1.0, 32.0  # sticks that reach all keys
    lengths, scale = on_device([715, 400]), p.q.shape[-1] ** -0.5
    chosen = launch(p, splits=8, first_splits=4)
    clean = decode_slots(p.q, p.k, p.v, lengths, scale, False, threshold, parameters=chosen)
    p.k[0, :, place] = torch.nan
    found = decode_slots(p.q, p.k, p.v, lengths, scale, False, threshold, parameters=chosen)
    for name in (0, 1):
        assert found[name][0].isnan().all()
        torch.testing.assert_close(found[name][1], clean[name][1], rtol=0, atol=0)


@pytest.mark.parametrize("threshold", [EXACT_STOP, math.log2(1e-4)], ids=["exact", "skip"])
@pytest.mark.parametrize("spent", [False, True])
def test_a_nan_query_spoils_no_row_beside_it(spent: bool, threshold: float, monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.full
    monkeypatch.setattr(torch, "empty", lambda shape, **options: full(shape, math.nan, **options))
    p = problem(batch=1, heads=3, groups=1, queries=1, keys=720, dtype=torch.float32, logit_scale=0.1)
    if spent:
        p.q[..., 0], p.k[..., 0] = 3.0, 3.0  # the newest keys take all of a stick
    length, scale = on_device([720]), p.q.shape[-1] ** -0.5
    chosen = launch(p, splits=8, first_splits=4)
    clean = decode_slots(p.q, p.k, p.v, length, scale, False, threshold, parameters=chosen)
    p.q[:, 1] = torch.nan
    found = decode_slots(p.q, p.k, p.v, length, scale, False, threshold, parameters=chosen)
    for name in (0, 1):
        assert found[name][:, 1].isnan().all()
        # a row that is not a number ends no walk, so the others see a few keys more
        atol = 1e-6 if threshold == EXACT_STOP else 1e-3
        torch.testing.assert_close(found[name][:, [0, 2]], clean[name][:, [0, 2]], rtol=1e-5, atol=atol)


@pytest.mark.parametrize("shared_memory_kib", [99, 163, 227])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_tiles_under_way_leave_a_small_gpu_room(head_dim: int, element_bytes: int, shared_memory_kib: int) -> None:
    chosen = slot_parameters(
        rows=1, room=65536, head_dim=head_dim, element_bytes=element_bytes, key_heads=16, multiprocessors=84,
        skipping=False, shared_memory_bytes=shared_memory_kib * 1024,
    )  # fmt: skip
    tile_bytes = 2 * chosen.block_keys * chosen.block_head_dim * element_bytes
    assert chosen.num_stages == 2 or 2 * chosen.num_stages * tile_bytes <= shared_memory_kib * 1024
    assert chosen.joined_splits & (chosen.joined_splits - 1) == 0 < chosen.joined_splits


def test_keys_behind_a_spent_stick_are_not_read() -> None:
    p = problem(batch=2, queries=1, keys=600, dtype=torch.float32, logit_scale=0.2)
    p.q[..., 0], p.k[..., 0] = 3.0, -3.0
    p.q[..., 1], p.k[..., 1] = 1.0, -1.0  # some 5 % of the stick a key
    lengths, threshold = on_device([600, 400]), math.log2(1e-4)
    chosen = launch(p, splits=8, first_splits=4)
    scale = p.q.shape[-1] ** -0.5
    everything = decode_slots(p.q, p.k, p.v, lengths, scale, False, -math.inf, parameters=chosen)
    p.k[0, :, :250], p.v[0, :, :250] = torch.nan, torch.nan
    skipped = decode_slots(p.q, p.k, p.v, lengths, scale, False, threshold, parameters=chosen)
    assert relative_error(skipped[0], everything[0]) < 1e-3
    assert (skipped[1] < 1e-4).all()
