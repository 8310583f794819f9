"""A plan's smallest difference is found in as many runs as it says, and its spread is that of the documents."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import nct, t

from sbeval.planning.power import Spread, smallest_difference
from sbeval.reports.analyse.statistics import simultaneous_band
from sbeval.reports.spreads import spread_of
from sbeval.results.intervals import ratio_interval

STUDIES = 1000
POWER = 0.8
MONTE_CARLO = 3.3 * math.sqrt(POWER * (1 - POWER) / STUDIES)
"""Half width of an interval that holds the share of studies in all but one of a thousand cases."""


def power_of(standardised: float, units: int, comparisons: int) -> float:
    """The exact probability that Student's interval of normal differences is above zero."""
    critical = t.ppf(1 - 0.05 / (2 * comparisons), units - 1)
    return float(nct.sf(critical, units - 1, standardised * math.sqrt(units)))


@given(
    spread=st.floats(1e-3, 10),
    units=st.integers(20, 5000),
    power=st.floats(0.5, 0.99),
    comparisons=st.integers(1, 8),
)
def test_the_smallest_difference_has_the_power(spread: float, units: int, power: float, comparisons: int) -> None:
    smallest = float(smallest_difference(spread, units, power=power, comparisons=comparisons))
    assert power_of(smallest / spread, units, comparisons) == pytest.approx(power, abs=0.005)
    assert smallest_difference(2 * spread, units, power=power, comparisons=comparisons) == pytest.approx(2 * smallest)
    assert smallest_difference(spread, units, power=power, comparisons=comparisons + 1) > smallest


@pytest.mark.exhaustive
@given(spread=st.floats(1e-3, 10), skewness=st.floats(-4, 4), units=st.integers(20, 5000), power=st.floats(0.5, 0.99))
def test_the_needed_documents_are_the_fewest_that_show_the_difference(
    spread: float, skewness: float, units: int, power: float
) -> None:
    stated = Spread(estimate=spread, skewness=skewness)

    def harder(documents: int) -> float:
        return max(stated.smallest(documents, rise=rise, power=power)[0] for rise in (True, False))

    needed, low, high = stated.needed(harder(units) * (1 + 1e-9), power=power)
    assert needed == low == high == units
    assert harder(units + 1) < harder(units)


def test_no_interval_shows_nothing_and_too_many_documents_do_not_exist() -> None:
    assert all(math.isnan(end) for end in Spread(estimate=1.0).smallest(19, rise=True))
    assert Spread(estimate=1.0).needed(100.0)[0] == 20
    assert Spread(estimate=1.0).needed(1e-9)[0] is None


def draw(random: np.random.Generator, documents: int, difference: float) -> tuple[np.ndarray, np.ndarray]:
    """Differences in nats (standard deviation 0.05 a token) and tokens of documents of uneven sizes."""
    tokens = np.maximum(32, random.lognormal(6.0, 0.5, documents)).round()
    return (difference + random.normal(0, 0.05, documents)) * tokens, tokens


@pytest.fixture(scope="module")
def spread() -> float:
    """The spread of a million such documents."""
    nats, tokens = draw(np.random.default_rng(5), 1_000_000, 0.0)
    return float(np.sqrt((nats**2).mean()) / tokens.mean())


@pytest.mark.parametrize("sign", [1, -1])
def test_differences_with_a_long_tail_are_shown_as_often_as_planned(sign: int) -> None:
    """Planned without their skewness, rises would be shown too often and falls too rarely."""
    documents, skewness = 120, 2.0
    random = np.random.default_rng(4)
    noise = sign * 0.05 * (random.exponential(1, (STUDIES, documents)) - 1)
    intervals = [ratio_interval(row, np.ones(documents), seed=seed, resamples=400) for seed, row in enumerate(noise)]
    lacks = np.array([-(interval.low or 0.0) for interval in intervals])

    def share(difference: float) -> float:
        return float((lacks < difference).mean())

    planned = float(smallest_difference(0.05, documents, skewness=sign * skewness))
    plain = float(smallest_difference(0.05, documents))
    assert abs(share(planned) - POWER) < MONTE_CARLO
    assert abs(share(plain) - POWER) > MONTE_CARLO


@pytest.mark.parametrize("documents", [40, 120])
def test_simulated_runs_find_the_smallest_difference_as_often_as_planned(documents: int, spread: float) -> None:
    difference = float(smallest_difference(spread, documents))
    random = np.random.default_rng(documents)
    shown = 0
    for study in range(STUDIES):
        low = ratio_interval(*draw(random, documents, difference), seed=study, resamples=400).low
        shown += low is not None and low > 0
    assert abs(shown / STUDIES - POWER) < MONTE_CARLO


@pytest.mark.exhaustive
def test_simulated_scores_show_a_share_of_changed_samples_as_often_as_planned() -> None:
    samples, changed = 200, 0.3
    difference = float(smallest_difference(changed**0.5, samples))
    random = np.random.default_rng(3)
    chances = [changed / 2 + difference / 2, changed / 2 - difference / 2, 1 - changed]
    shown = 0
    for study in range(STUDIES):
        scores = random.choice([1.0, -1.0, 0.0], samples, p=chances)[:, None]
        shown += simultaneous_band(scores, np.ones(samples), seed=study, resamples=400).lows[0] > 0
    assert abs(shown / STUDIES - POWER) < MONTE_CARLO


@pytest.mark.exhaustive
def test_pilots_plan_differences_that_are_shown_as_often_as_planned(spread: float) -> None:
    """A pilot's own spread, taken as certain, would be shown too rarely: where it is too small, power is lost."""
    documents, random = 40, np.random.default_rng(11)
    ends = [ratio_interval(*draw(random, documents, 0.0), seed=seed, resamples=400).low for seed in range(STUDIES)]
    lacks = np.sort([-(end or 0.0) for end in ends])
    pilots = [spread_of(*draw(random, 60, 0.02), graded=False) for _ in range(150)]
    plans = np.array([pilot.smallest(documents, rise=True) for pilot in pilots])
    certain = smallest_difference([pilot.estimate for pilot in pilots], documents)

    def share(differences: np.ndarray) -> float:
        return float(np.searchsorted(lacks, differences).mean() / STUDIES)

    assert share(certain) < POWER - 0.02 < share(plans[:, 0]) < POWER + 0.04
    true = float(smallest_difference(spread, documents))
    assert np.mean((plans[:, 1] < true) & (true < plans[:, 2])) > 0.9
    held = [low < spread < high for low, high in (pilot.interval for pilot in pilots)]
    assert np.mean(held) > 0.9


def test_equal_differences_have_no_spread_but_equal_scores_have_one() -> None:
    assert spread_of(np.full(30, 0.5), np.ones(30), graded=False).interval == (0.0, 0.0)
    certain = spread_of(np.zeros(30), np.ones(30), graded=True)
    assert certain.estimate > 0.1
    rare = spread_of(np.array([1.0] + 99 * [0.0]), np.ones(100), graded=True)
    assert all(math.isfinite(end) for end in (*rare.interval, *rare.smallest(40, rise=False)))


def test_differences_judged_at_once_need_more() -> None:
    """A band over four differences shows each of them in about the planned share of runs, or in more."""
    documents, comparisons = 60, 4
    spread = 0.05
    difference = float(smallest_difference(spread, documents, comparisons=comparisons))
    random = np.random.default_rng(8)
    shown = []
    for study in range(STUDIES):
        nats = random.normal(difference, spread, (documents, comparisons))
        shown.append(simultaneous_band(nats, np.ones(documents), seed=study, resamples=400).lows > 0)
    assert POWER - MONTE_CARLO < np.mean(shown) < POWER + 0.1
