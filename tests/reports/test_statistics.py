import numpy as np
import pandas as pd
import pytest

from sbeval.reports.analyse.statistics import (
    believed_error,
    graded_errors,
    share_interval,
    simultaneous_band,
    wilson_interval,
)


def clusters(generator: np.random.Generator, count: int, true: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.maximum(20, generator.lognormal(7, 1.0, count)).astype(int).astype(float)
    shared = generator.normal(0, 0.05, (count, 1))
    return (true + shared + generator.normal(0, 0.05, (count, len(true)))) * tokens[:, None], tokens


@pytest.mark.parametrize("count", [20, 62])
def test_the_band_covers_all_true_differences_about_as_often_as_it_says(count: int) -> None:
    generator = np.random.default_rng(count)
    true = np.array([-0.1, 0.0, 0.02, 0.05, 0.3])
    covered = 0
    for trial in range(150):
        band = simultaneous_band(*clusters(generator, count, true), seed=trial, resamples=500)
        covered += bool(((band.lows <= true) & (true <= band.highs)).all())
    assert 0.88 <= covered / 150 <= 1.0


def test_a_band_over_more_differences_is_wider() -> None:
    differences, tokens = clusters(np.random.default_rng(1), 40, np.zeros(8))
    one = simultaneous_band(differences[:, :1], tokens)
    eight = simultaneous_band(differences, tokens)
    assert eight.highs[0] - eight.lows[0] > one.highs[0] - one.lows[0]
    assert eight.estimates[0] == pytest.approx(one.estimates[0])
    assert one.estimates[0] == pytest.approx(differences[:, 0].sum() / tokens.sum())


def test_scaling_the_differences_scales_the_band() -> None:
    differences, tokens = clusters(np.random.default_rng(2), 30, np.array([0.1, 0.2]))
    small, large = simultaneous_band(differences, tokens), simultaneous_band(10 * differences, tokens)
    assert large.lows == pytest.approx(10 * small.lows)
    assert large.highs == pytest.approx(10 * small.highs)


def test_too_few_clusters_have_an_estimate_and_no_interval() -> None:
    differences, tokens = clusters(np.random.default_rng(3), 19, np.array([0.1]))
    band = simultaneous_band(differences, tokens)
    assert np.isfinite(band.estimates).all()
    assert np.isnan(band.lows).all()
    assert np.isnan(band.highs).all()


def test_no_cluster_is_no_estimate() -> None:
    band = simultaneous_band(np.zeros((0, 2)), np.zeros(0))
    assert np.isnan(band.estimates).all()
    assert band.clusters == 0


def test_differences_that_never_vary_have_a_band_of_no_width() -> None:
    tokens = np.arange(1.0, 31.0)
    band = simultaneous_band(0.25 * tokens[:, None], tokens)
    assert band.lows[0] == pytest.approx(0.25)
    assert band.highs[0] == pytest.approx(0.25)


def test_answers_that_hardly_differ_have_a_finite_band() -> None:
    differences = np.full((25, 1), -1.0)
    differences[0] = 0.0
    band = simultaneous_band(differences, np.ones(25))
    assert -1.2 < band.lows[0] < -0.96 < band.highs[0] < -0.8


@pytest.mark.parametrize("worse", [0.04, 0.1, 0.3])
def test_the_band_of_right_and_wrong_answers_covers_about_as_often_as_it_says(worse: float) -> None:
    generator = np.random.default_rng(5)
    covered = 0
    for trial in range(150):
        differences = np.where(generator.random((25, 4)) < worse, -1.0, 0.0)
        least = graded_errors(differences, np.ones(25))
        band = simultaneous_band(differences, np.ones(25), seed=trial, resamples=300, least_errors_K=least)
        covered += bool(((band.lows <= -worse) & (-worse <= band.highs)).all())
    assert covered / 150 >= 0.92


def test_a_share_that_every_sample_has_in_common_is_no_certainty() -> None:
    rows = pd.DataFrame({"value": [1.0, 0.5, 0.0], "stderr": [0.0, 0.05, 0.0], "samples": [10.0, 100.0, np.nan]})
    lows, highs = share_interval(rows)
    assert lows.tolist() == pytest.approx([0.7225, 0.402, np.nan], abs=1e-4, nan_ok=True)
    assert highs.tolist() == pytest.approx([1.0, 0.598, np.nan], abs=1e-4, nan_ok=True)
    assert believed_error(rows).tolist() == pytest.approx([0.0798, 0.05, np.nan], abs=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"), [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634)]
)
def test_wilson_interval_has_its_published_values(successes: float, trials: float, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)


def test_no_trial_is_no_interval() -> None:
    assert all(np.isnan(wilson_interval(0, 0)))


def test_differences_may_rest_on_targets_of_their_own() -> None:
    differences, tokens = clusters(np.random.default_rng(4), 40, np.array([0.1, 0.2]))
    shared = simultaneous_band(differences, tokens)
    repeated = simultaneous_band(differences, np.stack([tokens, tokens], axis=1))
    assert repeated.lows == pytest.approx(shared.lows)
    half = np.stack([tokens, np.where(np.arange(40) < 25, tokens, 0.0)], axis=1)
    differences[25:, 1] = 0.0
    band = simultaneous_band(differences, half)
    assert band.estimates[1] == pytest.approx(differences[:25, 1].sum() / tokens[:25].sum())
    alone = simultaneous_band(differences[:25, 1:], tokens[:25])
    assert band.highs[1] - band.lows[1] > 0.95 * (alone.highs[0] - alone.lows[0])
