"""The first step whose logits are none, as a plain loop finds it, without a word from the host."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sbeval.scoring.non_finite import FiniteWatch, NoText, check_finite, is_null, non_finite_weights


@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from([math.nan, math.inf, -math.inf, None]),
    st.integers(0, 11),
)
def test_weights_of_nan_are_found_and_large_ones_are_not(dtype: torch.dtype, value: float | None, place: int) -> None:
    model = torch.nn.Linear(4, 3, dtype=dtype)
    with torch.no_grad():
        model.weight.fill_(torch.finfo(dtype).max)
        if value is not None:
            model.weight.view(-1)[place] = value
    assert non_finite_weights(model) == ([] if value is None else ["weight"])


ROW = st.lists(st.sampled_from([0.5, -2.0, -math.inf, math.inf, math.nan]), min_size=3, max_size=3)


def none(row: list[float]) -> bool:
    """Whether a softmax over the row is none."""
    return bool(torch.tensor(row).softmax(0).isnan().any())


@given(st.lists(st.tuples(ROW, ROW), min_size=1, max_size=6), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_first_step_that_is_none_is_found(steps: list[tuple[list[float], list[float]]], dtype: torch.dtype) -> None:
    watch = FiniteWatch(2, "cpu")
    for number, rows in enumerate(steps):
        found = watch(torch.zeros(2, 10 + number, dtype=torch.int64), torch.tensor(rows, dtype=dtype))
        assert not found.float().softmax(-1).isnan().any()
    expected = [next((10 + n for n, rows in enumerate(steps) if none(rows[row])), None) for row in range(2)]
    assert watch.first_tokens(2) == expected


def test_a_step_asks_the_device_for_nothing() -> None:
    FiniteWatch(2, "meta").note(torch.empty(2, 5, device="meta"), torch.empty((), dtype=torch.int64, device="meta"))


def test_lengths_may_be_on_the_device_and_beams_are_their_prompts() -> None:
    watch, beams = FiniteWatch(2, "cpu"), FiniteWatch(2, "cpu")
    watch.note(torch.full((2, 5), math.nan), torch.tensor(7))
    watch.note(torch.full((2, 5), math.nan), torch.tensor([3, 9]))
    assert watch.first_tokens(2) == [3, 7]
    beams(torch.zeros(6, 4, dtype=torch.int64), torch.tensor([[0.0], [0.0], [math.nan], [0.0], [0.0], [0.0]]))
    assert beams.first_tokens(2) == [4, None]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_scores_name_their_row_position_and_length(value: float) -> None:
    with pytest.raises(ValueError, match=f"found {value} for the token after position 4 of an input of 6") as raised:
        check_finite(torch.tensor([0.0, value, 0.0]), torch.tensor([0, 1, 1]), torch.tensor([7, 4, 5]))
    assert raised.value.row == 1  # type: ignore[attr-defined]


def test_no_text_stays_what_it_is_in_a_response_cache() -> None:
    kept = pickle.loads(pickle.dumps(NoText("Expected text", 3)))
    assert is_null(kept)
    assert kept == ""
    assert str(kept.error.of("request 0")).startswith("Expected text in request 0: ")
