"""The studentised cluster bootstrap: coverage by simulation, and what it is invariant to."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbeval.results.intervals import MINIMUM_CLUSTERS, ratio_interval, resampled, uneven


def clusters(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Skewed document sizes, skewed NLL a token, and longer documents that are a little harder.

    The ratio of means is exactly 2.5 + 0.1 * 0.8**2: E[x log x] / E[x] of a log-normal is mu + sigma**2.
    """
    random = np.random.default_rng(seed)
    log_size = random.normal(0, 0.8, count)
    tokens = np.exp(log_size) * 3000
    nll = 2.5 + random.gamma(2, 0.3, count) - 0.6 + 0.1 * log_size
    return nll * tokens, tokens


@pytest.mark.parametrize("count", [20, 62])
def test_coverage_is_near_its_name(count: int) -> None:
    truth, runs = 2.5 + 0.1 * 0.8**2, 600
    inside = 0
    for run in range(runs):
        found = ratio_interval(*clusters(count, run), seed=0, resamples=600)
        inside += found.low <= truth <= found.high
    # 95 % less three standard errors of the simulation, less two points for a studentised interval at 20 clusters
    assert 0.95 - 3 * np.sqrt(0.95 * 0.05 / runs) - (0.02 if count == 20 else 0.01) <= inside / runs <= 0.985


def test_a_few_clusters_give_an_estimate_and_no_interval() -> None:
    nll, tokens = clusters(MINIMUM_CLUSTERS - 1, 0)
    found = ratio_interval(nll, tokens, seed=0)
    assert found.estimate == pytest.approx(nll.sum() / tokens.sum())
    assert (found.low, found.high, found.clusters) == (None, None, MINIMUM_CLUSTERS - 1)


def test_clusters_without_targets_do_not_count() -> None:
    nll, tokens = clusters(25, 0)
    assert ratio_interval([*nll, *[0.0] * 30], [*tokens, *[0.0] * 30], seed=3) == ratio_interval(nll, tokens, seed=3)


def test_a_cluster_without_a_denominator_keeps_its_numerator() -> None:
    """A source document whose targets lie inside one long word has NLL and no word that begins in it."""
    nll, words = clusters(25, 0)
    words[3] = 0
    found = ratio_interval(nll, words, seed=0)
    assert (found.estimate, found.clusters) == (pytest.approx(nll.sum() / words.sum()), 25)
    assert found.low < found.estimate < found.high
    mostly_none = ratio_interval(np.ones(20), [*np.zeros(19), 5.0], seed=0)
    assert mostly_none.estimate == pytest.approx(4.0)
    assert np.isfinite([mostly_none.low, mostly_none.high]).all()  # type: ignore[list-item]
    assert np.isnan(ratio_interval(np.ones(20), np.zeros(20), seed=0).estimate)


def test_nothing_at_all_is_nan_not_zero() -> None:
    assert np.isnan(ratio_interval([], [], seed=0).estimate)
    assert np.isnan(ratio_interval([1.0, 2.0], [float("nan"), 1.0], seed=0).estimate)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), scale=st.floats(0.01, 100), shift=st.floats(-5, 5))
def test_interval_follows_scale_and_shift(seed: int, scale: float, shift: float) -> None:
    nll, tokens = clusters(30, seed)
    plain = ratio_interval(nll, tokens, seed=1, resamples=300)
    moved = ratio_interval(scale * (nll + shift * tokens), tokens, seed=1, resamples=300)
    assert moved.low == pytest.approx(scale * (plain.low + shift), rel=1e-6, abs=1e-6)  # type: ignore[operator]
    assert moved.high == pytest.approx(scale * (plain.high + shift), rel=1e-6, abs=1e-6)  # type: ignore[operator]


def test_a_paired_difference_is_tighter_than_two_intervals() -> None:
    nll, tokens = clusters(40, 5)
    other = nll - 0.05 * tokens + np.random.default_rng(0).normal(0, 0.01, 40) * tokens
    paired = ratio_interval(nll - other, tokens, seed=0)
    single = ratio_interval(nll, tokens, seed=0)
    assert paired.low > 0
    assert paired.high - paired.low < (single.high - single.low) / 4  # type: ignore[operator]


@pytest.mark.parametrize("count", [40, 400])
def test_the_same_seed_repeats_and_another_moves_the_ends_by_a_few_percent_of_the_half_width(count: int) -> None:
    nll, tokens = clusters(count, 2)
    assert ratio_interval(nll, tokens, seed=9) == ratio_interval(nll, tokens, seed=9)
    ends = np.array([ratio_interval(nll, tokens, seed=seed)[1:3] for seed in range(8)], float)
    moves = np.ptp(ends, axis=0) / np.diff(ends.mean(axis=0))
    assert (moves > 0).all()
    assert (moves < 0.06).all()


@pytest.mark.parametrize("count", [25, 400, 20_000])
def test_every_resample_draws_as_many_clusters_as_there_are(count: int) -> None:
    seen = []

    def statistic(counts_BC: np.ndarray) -> np.ndarray:
        seen.append(counts_BC)
        return counts_BC[:, 0]

    values = resampled(statistic, count, resamples=3000, seed=1)
    counts = np.concatenate([chunk[:, :25] for chunk in seen])
    assert all((chunk.sum(axis=1) == count).all() for chunk in seen)
    assert len(values) == len(counts) == 3000
    # a count is binomial: its mean is 1, its variance 1 - 1 / C
    assert counts.mean(axis=0) == pytest.approx(np.ones(25), abs=0.1)
    assert counts.var(axis=0) == pytest.approx(np.full(25, 1 - 1 / count), abs=0.2)


@pytest.mark.parametrize(("deviation", "expected"), [(0.1, False), (0.8, False), (1.3, True), (2.0, True)])
def test_sizes_are_uneven_where_their_logs_deviate_by_more_than_one(deviation: float, expected: bool) -> None:
    sizes = np.exp(np.random.default_rng(0).normal(0, deviation, 200))
    assert uneven([*sizes, 0.0]) is expected
    assert uneven(1000 * sizes) is expected
    assert not uneven([5.0])


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="one length"):
        ratio_interval([1.0, 2.0], [1.0], seed=0)
