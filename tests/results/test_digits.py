"""Differences are shown with digits enough to be read, and with no more."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbeval.results.digits import change_text, time_text, with_interval

SIZES = st.floats(1e-5, 30) | st.floats(-30, -1e-5)


@given(SIZES)
def test_two_digits_of_a_difference_are_shown_however_small_it_is(difference: float) -> None:
    text, *_ = change_text(difference)
    assert abs(float(text) - difference) <= 0.051 * abs(difference) or len(text.split(".")[1]) == 6
    assert float(text) != 0
    assert text[0] == ("-" if difference < 0 else "+")


@given(SIZES, st.floats(1e-5, 10))
def test_an_interval_keeps_its_width(difference: float, width: float) -> None:
    ends = [float(end) for end in change_text(difference, difference - width / 2, difference + width / 2)[1:]]
    assert abs(ends[1] - ends[0] - width) <= max(0.11 * width, 1e-6)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0.12, 0.1, 0.14), "+0.120 [+0.100, +0.140]"),
        ((0.003, 0.001, 0.005), "+0.0030 [+0.0010, +0.0050]"),
        ((-0.0031,), "-0.0031"),
        ((3.43,), "+3.430"),
        ((0.0,), "+0.000"),
        ((math.nan,), "+nan"),
    ],
)
def test_examples(numbers: tuple[float, ...], text: str) -> None:
    assert with_interval(*numbers) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.24, "0.2 s"), (57.4, "57 s"), (89.6, "90 s"), (90.0, "1.5 min"), (5399.0, "90.0 min"), (40_000.0, "11.1 h")],
)
def test_times_are_short(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
