"""The rule that names how far more context lowers NLL, on models that it must not name a length for."""

import pytest

from research.interval_studies.lengths_rule import NOISE, names_on_a_flat_curve, own_step

pytestmark = pytest.mark.exhaustive

TRIALS, SEEN_ONCE_IN_A_HUNDRED = 200, 15
"""Of 200 draws, 15 or more name a length in one of a hundred tries if 4 % of all draws do."""


@pytest.mark.parametrize("noise", ["normal", "exponential, long tail above", "log-normal, long tail above"])
def test_a_flat_curve_of_20_documents_is_seldom_said_to_fall_though_its_differences_are_skewed(noise: str) -> None:
    share = names_on_a_flat_curve(own_step, NOISE[noise], documents=20, size_log_deviation=0.1, trials=TRIALS)
    assert share < SEEN_ONCE_IN_A_HUNDRED / TRIALS
