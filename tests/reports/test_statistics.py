"""Intervals and bands: what they cover, and what two models' samples allow to be said."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from result_files import model_record, ordinary_task, write_run

from sbeval.reports import load_results
from sbeval.reports.analyse.paired import PairedDifference, ruler_differences, task_difference
from sbeval.reports.analyse.statistics import (
    graded_errors,
    mean_interval,
    score_interval,
    share_interval,
    simultaneous_band,
    wilson_interval,
)
from sbeval.reports.analyse.suite import suite_rows
from sbeval.reports.read.samples import SampleScores

ACC = ("acc", "none")


def clusters(generator: np.random.Generator, count: int, true: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.maximum(20, generator.lognormal(7, 1.0, count)).astype(int).astype(float)
    shared = generator.normal(0, 0.05, (count, 1))
    return (true + shared + generator.normal(0, 0.05, (count, len(true)))) * tokens[:, None], tokens


@pytest.mark.parametrize("count", [20, 62])
def test_the_band_covers_all_true_differences_about_as_often_as_it_says(count: int) -> None:
    generator = np.random.default_rng(count)
    true = np.array([-0.1, 0.0, 0.02, 0.05, 0.3])
    covered = 0
    for _ in range(150):
        band = simultaneous_band(*clusters(generator, count, true), resamples=500)
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
    small, large = (simultaneous_band(scale * differences, tokens, resamples=2000) for scale in (1, 10))
    assert (large.lows, large.highs) == (pytest.approx(10 * small.lows), pytest.approx(10 * small.highs))


def test_the_band_of_another_seed_is_as_wide_but_for_a_few_percent() -> None:
    differences, tokens = clusters(np.random.default_rng(6), 40, np.zeros(6))
    bands = [simultaneous_band(differences, tokens, seed=seed) for seed in (0, 0, *range(1, 8))]
    widths = [band.highs[0] - band.lows[0] for band in bands]
    assert widths[0] == widths[1] != widths[2]
    assert np.ptp(widths) < 0.04 * widths[0]


def test_a_band_over_clusters_of_very_unequal_sizes_is_doubtful() -> None:
    generator = np.random.default_rng(7)
    even, uneven = np.full(40, 500.0), 500 * generator.lognormal(0, 1.5, 40)
    for weights, expected in ((even, False), (uneven, True)):
        differences = generator.normal(0.1, 0.1, (40, 3)) * weights[:, None]
        assert simultaneous_band(differences, weights).doubtful is expected


def test_too_few_clusters_have_an_estimate_and_no_interval_and_none_has_neither() -> None:
    differences, tokens = clusters(np.random.default_rng(3), 19, np.array([0.1]))
    band, none = simultaneous_band(differences, tokens), simultaneous_band(np.zeros((0, 2)), np.zeros(0))
    assert np.isfinite(band.estimates).all()
    assert np.isnan([*band.lows, *band.highs, *none.estimates]).all()
    assert none.clusters == 0


def test_differences_that_never_vary_have_a_band_of_no_width() -> None:
    tokens = np.arange(1.0, 31.0)
    band = simultaneous_band(0.25 * tokens[:, None], tokens)
    assert (band.lows[0], band.highs[0]) == pytest.approx((0.25, 0.25))


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
    rows = pd.DataFrame({"value": [1.0, 0.5, 0.0, 3.0], "stderr": [0.0, 0.05, 0.0, 0.1], "samples": [10, 101, None, 9]})
    lows, highs = share_interval(rows)
    assert lows.tolist() == pytest.approx([0.7225, 0.4042, np.nan, np.nan], abs=1e-4, nan_ok=True)
    assert highs.tolist() == pytest.approx([1.0, 0.5958, np.nan, np.nan], abs=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (0, 0, np.nan, np.nan)],
)
def test_wilson_interval_has_its_published_values(successes: float, trials: float, low: float, high: float) -> None:
    found = np.array(wilson_interval(successes / max(trials, 1), trials))
    assert found == pytest.approx([low, high], abs=1e-4, nan_ok=True)


def moments(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    return scores.mean(axis=-1), scores.std(axis=-1, ddof=1) / scores.shape[-1] ** 0.5, scores.shape[-1]


@given(answers=st.lists(st.booleans(), min_size=2, max_size=60))
def test_the_interval_of_right_and_wrong_answers_is_wilsons(answers: list[bool]) -> None:
    scores = np.array(answers, dtype=float)
    assert score_interval(*moments(scores)) == pytest.approx(wilson_interval(scores.mean(), len(scores)))


@given(scores=st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=2, max_size=60))
def test_the_interval_of_shares_lies_within_that_of_right_and_wrong_answers(scores: list[float]) -> None:
    found = np.array(scores)
    low, high = score_interval(*moments(found))
    least, most = wilson_interval(found.mean(), len(found))
    assert least - 1e-9 <= low < high <= most + 1e-9
    assert low - 1e-9 <= found.mean() <= high + 1e-9


def test_scores_of_unknown_number_take_it_from_their_variance() -> None:
    assert score_interval(0.9, (0.09 / 200) ** 0.5, np.nan) == pytest.approx(wilson_interval(0.9, 200))


@pytest.mark.parametrize("mean", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("samples", [10, 30, 100])
@pytest.mark.parametrize("answers", [4, 10])
def test_the_interval_of_shares_covers_as_often_as_it_says(answers: int, samples: int, mean: float) -> None:
    random = np.random.default_rng(samples)
    chance = random.beta(2 * mean, 2 - 2 * mean, (4000, samples))
    lows, highs = score_interval(*moments(random.binomial(answers, chance) / answers))
    assert ((lows <= mean) & (mean <= highs)).mean() >= 0.94


def test_an_interval_of_a_mean_keeps_the_longer_side_of_its_parts() -> None:
    half = 0.02**0.5 / 2
    assert mean_interval([0.5, 0.5], [0.4, 0.4], [0.6, 0.6]) == pytest.approx((0.5 - half, 0.5 + half))
    low, high = mean_interval([1.0, 0.8], [0.7, 0.6], [1.0, 0.9])
    assert (low, high) == pytest.approx((0.9 - 0.13**0.5 / 2, 0.95))
    assert np.isnan(mean_interval([1.0, 0.8], [np.nan, 0.6], [1.0, 0.9])[0])


def test_differences_may_rest_on_targets_of_their_own() -> None:
    differences, tokens = clusters(np.random.default_rng(4), 40, np.array([0.1, 0.2]))
    shared = simultaneous_band(differences, tokens)
    assert simultaneous_band(differences, np.stack([tokens, tokens], axis=1)).lows == pytest.approx(shared.lows)
    half = np.stack([tokens, np.where(np.arange(40) < 25, tokens, 0.0)], axis=1)
    differences[25:, 1] = 0.0
    band = simultaneous_band(differences, half)
    assert band.estimates[1] == pytest.approx(differences[:25, 1].sum() / tokens[:25].sum())
    alone = simultaneous_band(differences[:25, 1:], tokens[:25])
    assert band.highs[1] - band.lows[1] > 0.95 * (alone.highs[0] - alone.lows[0])


def scores(values: list[float], metric: tuple[str, str] = ACC) -> SampleScores:
    return SampleScores(scores={metric: {(str(place), "hash"): value for place, value in enumerate(values)}})


def difference(own: list[float], base: list[float]) -> PairedDifference | None:
    return task_difference(scores(own), scores(base), ACC)


def test_pairing_takes_out_how_hard_the_questions_are() -> None:
    generator = np.random.default_rng(0)
    level = generator.normal(0.5, 0.3, 200)
    found = difference(list(level + 0.02 + generator.normal(0, 0.01, 200)), list(level))
    assert 0.015 < found.low < found.estimate < found.high < 0.025


def test_only_questions_both_answered_are_compared_and_few_have_no_interval() -> None:
    found = difference([1.0] * 30, [0.0] * 25)
    assert (found.estimate, found.samples) == (1.0, 25)
    assert task_difference(scores([1.0]), SampleScores(scores={ACC: {("0", "another"): 1.0}}), ACC) is None
    assert np.isnan(difference([1.0, 0.0, 1.0], [0.0, 0.0, 0.0]).low)


def test_two_models_that_agree_on_every_question_are_not_certainly_alike() -> None:
    found = difference([1.0] * 30, [1.0] * 30)
    assert (found.estimate, found.low) == (0.0, pytest.approx(-found.high))
    assert 0.05 < found.high < 0.2
    found = difference([0.0] * 30, [1.0] * 30)
    assert found.low == -1.0 < found.high < -0.8


def test_every_ruler_task_weighs_the_same_whatever_its_samples() -> None:
    metric = ("score@0004096", "none")
    own = {"sb_ruler_vt": scores([1.0] * 100, metric), "sb_niah_single_1": scores([0.0] * 25, metric)}
    base = {"sb_ruler_vt": scores([0.0] * 100, metric), "sb_niah_single_1": scores([0.5] * 25, metric)}
    found, tasks = ruler_differences(own, base)
    assert set(tasks) == {"sb_ruler_vt", "sb_niah_single_1"}
    assert found[4096].estimate == pytest.approx((1.0 - 0.5) / 2)


def test_the_table_of_tasks_pairs_by_sample_where_samples_were_logged(tmp_path: Path) -> None:
    differences = []
    for log_samples in (True, False):
        folder = tmp_path / str(log_samples)
        for attention, level in (("rope", 0.5), ("stickbreaking", 0.6)):
            tasks = [ordinary_task("piqa", "acc", level, samples=400)]
            write_run(folder / attention, model_record(attention), tasks, log_samples=log_samples)
        (row,) = suite_rows(load_results([folder]))
        differences.append(row.difference("demo-sb", "demo-rope"))
    paired, unpaired = differences
    assert (paired.samples, unpaired.samples) == (400, 0)
    assert unpaired.high - unpaired.low > paired.high - paired.low


def test_an_end_of_a_band_is_widened_on_the_side_that_misses_more_often() -> None:
    random = np.random.default_rng(0)
    skewed = random.exponential(size=(30, 5)) - 1
    even, each = (simultaneous_band(skewed, np.ones(30), each_side=side) for side in (False, True))
    assert (each.highs > even.highs).all()
    np.testing.assert_array_equal(each.lows, even.lows)
    np.testing.assert_array_equal(each.estimates, even.estimates)
    mirrored = simultaneous_band(-skewed, np.ones(30), each_side=True)
    np.testing.assert_allclose(mirrored.lows, -each.highs)
