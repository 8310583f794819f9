"""The studentised cluster bootstrap: coverage by simulation, and what it is invariant to."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbeval.results.intervals import MINIMUM_CLUSTERS, quantile_error, ratio_interval, resampled_until, uneven


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
        assert found.low is not None
        assert found.high is not None
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
    padded = ratio_interval([*nll, *[0.0] * 30], [*tokens, *[0.0] * 30], seed=3)
    assert padded == ratio_interval(nll, tokens, seed=3)


def test_a_cluster_without_a_denominator_keeps_its_numerator() -> None:
    """A source document whose targets lie inside one long word has NLL and no word that begins in it."""
    nll, words = clusters(25, 0)
    words[3] = 0
    found = ratio_interval(nll, words, seed=0)
    assert found.estimate == pytest.approx(nll.sum() / words.sum())
    assert found.clusters == 25
    assert found.low is not None
    assert found.high is not None
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
    assert paired.low is not None
    assert paired.low > 0
    assert paired.high - paired.low < (single.high - single.low) / 4  # type: ignore[operator]


def test_many_clusters_need_no_more_memory_and_the_same_seed_repeats() -> None:
    nll, tokens = clusters(3000, 1)
    found = ratio_interval(nll, tokens, seed=9, resamples=1000)
    assert found == ratio_interval(nll, tokens, seed=9, resamples=1000)
    assert found != ratio_interval(nll, tokens, seed=10, resamples=1000)


@pytest.mark.parametrize("scale", [0.05, 0.4])
def test_intervals_of_other_seeds_differ_by_one_thousandth_at_most(scale: float) -> None:
    nll, tokens = clusters(40, 2)
    found = [ratio_interval(scale * nll, tokens, seed=seed) for seed in range(8)]
    shown = np.array([[one.low, one.high] for one in found], float).round(3)
    assert np.ptp(shown, axis=0).max() <= 0.001 + 1e-9
    few = [ratio_interval(0.4 * nll, tokens, seed=seed, resamples=2000).low for seed in range(8)]
    assert np.ptp(np.array(few, float).round(3)) > 0.001 + 1e-9


def test_resamples_that_are_dealt_anew_spread_like_resamples_of_their_own() -> None:
    """64,000 resamples are four deals of the same counts; their quantiles over seeds err as independent ones would."""
    nll, tokens = clusters(30, 3)
    ends = [ratio_interval(nll, tokens, seed=seed, resamples=64_000, precision=0).high for seed in range(40)]
    alone = [ratio_interval(nll, tokens, seed=seed, resamples=16_000, precision=0).high for seed in range(40)]
    assert np.std(alone) / np.std(ends) == pytest.approx(2, rel=0.35)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [25, 400, 20_000])
def test_every_resample_draws_as_many_clusters_as_there_are(count: int) -> None:
    seen = []

    def statistic(counts_BC: np.ndarray) -> np.ndarray:
        seen.append(counts_BC)
        return counts_BC[:, 0]

    values = resampled_until(lambda values: True, statistic, count, resamples=3000, seed=1)
    counts = np.concatenate([part[:, :25] for part in seen])
    assert all((part.sum(axis=1) == count).all() for part in seen)
    assert len(values) == len(counts) == 3000
    # a count is binomial: its mean is 1, its variance 1 - 1 / C
    assert counts.mean(axis=0) == pytest.approx(np.ones(25), abs=0.1)
    assert counts.var(axis=0) == pytest.approx(np.full(25, 1 - 1 / count), abs=0.2)


def test_many_clusters_take_fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbeval.results.intervals._MOST_DRAWS", 10_000_000)

    def resampled(count: int) -> int:
        return len(resampled_until(lambda values: False, lambda counts: counts[:, 0], count, resamples=50_000, seed=0))

    assert [resampled(count) for count in (20, 1000, 10_000)] == [50_000, 10_000, 4000]


def test_few_resamples_are_enough_where_the_interval_is_narrow() -> None:
    nll, tokens = clusters(40, 2)
    narrow = [ratio_interval(nll / 1000, tokens, seed=0, resamples=most) for most in (10_000, 64_000)]
    assert narrow[0] == narrow[1]


def test_the_error_of_a_quantile_is_what_repeated_draws_show() -> None:
    random = np.random.default_rng(0)
    draws = random.normal(size=(300, 4000))
    claimed = np.mean([quantile_error(draw, 0.95) for draw in draws])
    assert claimed == pytest.approx(np.quantile(draws, 0.95, axis=1).std(), rel=0.15)


@pytest.mark.parametrize(("deviation", "expected"), [(0.1, False), (0.8, False), (1.3, True), (2.0, True)])
def test_sizes_are_uneven_where_their_logs_deviate_by_more_than_one(deviation: float, expected: bool) -> None:
    sizes = np.exp(np.random.default_rng(0).normal(0, deviation, 200))
    assert uneven([*sizes, 0.0]) is expected
    assert uneven(1000 * sizes) is expected
    assert not uneven([5.0])


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="one length"):
        ratio_interval([1.0, 2.0], [1.0], seed=0)
