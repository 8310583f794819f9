import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from document_sums import LENGTHS, sums
from hypothesis import given
from hypothesis import strategies as st
from result_files import CURVES, write_pair

from sbeval.reports import build_report
from sbeval.reports.analyse.claims import LengthClaims, LengthDifference, last_gain_step
from sbeval.reports.analyse.one_number import effective_nll_length, nll_area, score_area
from sbeval.reports.analyse.statistics import change_weights, octave_weights
from sbeval.reports.read.samples import SumsByDocument

lengths = st.lists(st.integers(1, 2**20), min_size=2, max_size=12, unique=True).map(sorted)


@given(lengths, st.floats(-5, 5), st.floats(-5, 5))
def test_mean_over_octaves_of_a_line_in_log_length_is_its_middle(own: list[int], slope: float, start: float) -> None:
    curve = start + slope * np.log2(own)
    assert octave_weights(own) @ curve == pytest.approx((curve[0] + curve[-1]) / 2, abs=1e-9)


@given(lengths, st.data())
def test_a_length_read_off_the_curve_between_two_others_changes_nothing(own: list[int], data: Any) -> None:
    curve = np.array([data.draw(st.floats(-3, 3)) for _ in own])
    more = sorted({*own, data.draw(st.integers(own[0], own[-1]))})
    between = np.interp(np.log2(more), np.log2(own), curve)
    assert octave_weights(more) @ between == pytest.approx(octave_weights(own) @ curve, abs=1e-9)


@given(lengths, st.data())
def test_the_change_of_a_level_curve_is_zero_and_shorter_lengths_have_no_part(own: list[int], data: Any) -> None:
    reference = data.draw(st.sampled_from(own))
    weights = change_weights(own, reference)
    assert (weights is None) == (reference == own[-1])
    if weights is not None:
        assert weights.sum() == pytest.approx(0, abs=1e-12)
        assert not weights[: own.index(reference)].any()


def test_the_area_of_nll_is_the_mean_change_beyond_the_training_length() -> None:
    area = nll_area(sums([9.0, 9.0, 2.0, 3.0, 4.0]), 1024)
    assert (area.from_tokens, area.to_tokens, area.units) == (1024, 4096, 40)
    assert area.estimate == pytest.approx(1.0, abs=0.01)
    # levels of documents cancel, so the interval is far below their spread
    assert area.low < area.estimate < area.high < area.low + 0.02


def test_documents_with_other_targets_at_some_length_have_no_part_in_the_area() -> None:
    spoilt = sums([2.0, 2.0, 2.0, 2.0, 2.0])
    spoilt.tokens[0, 3] += 1
    spoilt.nll_nats[0] *= 50
    area = nll_area(spoilt, 1024)
    assert area.units == 39
    assert abs(area.estimate) < 0.01


def test_few_documents_give_an_area_without_interval_and_no_longer_length_gives_none() -> None:
    assert math.isnan(nll_area(sums([2.0] * 5, documents=12), 1024).low)
    assert nll_area(sums([2.0] * 5), 4096) is None
    assert nll_area(sums([2.0] * 5), None) is None


def test_the_interval_of_an_area_covers_it() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        tokens = np.full(40, 500.0)
        nats = (random.normal(0, 0.3, (40, 1)) + random.normal(0, 0.05, (40, 5))) * tokens[:, None]
        table = {n: {str(i): np.array([nats[i, k], 500, 0]) for i in range(40)} for k, n in enumerate(LENGTHS)}
        area = nll_area(SumsByDocument(table), 1024)
        covered += area.low <= 0 <= area.high
    assert covered >= 180  # of 200 at 95 %, fewer than 180 come by chance once in a thousand


def test_the_area_of_scores_is_over_all_lengths_and_has_an_interval_where_samples_were_logged() -> None:
    means = {1024: 1.0, 2048: 0.5, 4096: 0.0}
    assert score_area({1024: 1.0}) is None
    plain = score_area(means)
    assert plain.estimate == pytest.approx(0.5)
    assert math.isnan(plain.low)
    assert plain.units is None
    keys = [(str(i), "") for i in range(50)]
    half = {key: place % 2 for place, key in enumerate(keys)}
    answers = {1024: dict.fromkeys(keys, 1.0), 2048: half, 4096: dict.fromkeys(keys, 0.0)}
    logged = score_area(means, [answers, answers])
    assert logged.units == 100
    assert logged.low < 0.5 < logged.high
    assert math.isnan(score_area({1024: 0.9, 2048: 0.5, 4096: 0.0}, [answers]).low)


def claim(bands: list[tuple[float, float]], least: int = 256) -> LengthClaims:
    own = tuple(least * 2**index for index in range(len(bands) + 1))
    steps = tuple(
        LengthDifference(context_length_tokens=length, estimate=(low + high) / 2, low=low, high=high)
        for length, (low, high) in zip(own[1:], bands, strict=True)
    )
    last = last_gain_step([-1 if step.high < 0 else 1 if step.low > 0 else 0 for step in steps])
    return LengthClaims(lengths=own, steps=steps, lowers_to_tokens=own[last] if last else None)


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=8))
def test_the_effective_length_lies_within_its_interval_whenever_the_band_holds_the_true_steps(
    steps: list[tuple[float, float, float]],
) -> None:
    found = effective_nll_length(claim([(true - below, true + above) for true, below, above in steps]))
    true_steps = last_gain_step([int(np.sign(true)) for true, _, _ in steps])
    true_length = 256 * 2**true_steps if true_steps else 0
    assert (found.low or 0) <= true_length <= (found.high or 0)
    assert (found.low or 0) <= (found.tokens or 0) <= (found.high or 0)


@pytest.mark.parametrize(
    ("bands", "text"),
    [
        ([(-0.2, -0.1), (-0.2, -0.1)], "≥ 1K [≥ 1K, ≥ 1K]"),
        ([(-0.2, -0.1), (-0.1, 0.1), (-0.2, -0.1), (0.1, 0.2)], "2K [512, 2K]"),
        ([(0.1, 0.2), (-0.2, -0.1)], "none [none, none]"),
        ([(-0.1, 0.1), (-0.1, 0.1)], "none [none, ≥ 1K]"),
    ],
)
def test_an_effective_length_that_is_the_longest_compared_is_written_as_at_least_that(
    bands: list[tuple[float, float]], text: str
) -> None:
    assert effective_nll_length(claim(bands)).text == text


def test_a_loss_too_small_to_count_leaves_the_upper_end_open() -> None:
    assert effective_nll_length(claim([(-0.2, -0.1), (0.01, 0.02)]), least_loss=0.02).high == 1024
    assert effective_nll_length(LengthClaims(obstacle="too few")) is None


@pytest.mark.exhaustive
def test_a_report_holds_one_number_a_curve_in_its_overview_its_tables_and_a_file(tmp_path: Path) -> None:
    write_pair(tmp_path / "results", "fixed_target")
    folder = build_report([tmp_path / "results"], tmp_path / "report", image_formats=()).parent
    numbers = pd.read_csv(folder / "numbers.csv").set_index(["setting", "metric"])
    for name, attention in (("demo-sb", "stickbreaking"), ("demo-rope", "rope")):
        beyond = CURVES[attention][2:]
        middles = [(left + right) / 2 - beyond[0] for left, right in itertools.pairwise(beyond)]
        change = numbers.loc[(name, "nll_change")]
        assert change["value"] == pytest.approx(sum(middles) / len(middles), abs=0.02)
        assert change["ci95_low"] < change["value"] < change["ci95_high"]
        assert (change["from_tokens"], change["to_tokens"]) == (1024, 65536)
    assert numbers.loc[("demo-rope", "effective_nll_length")]["ci95_high"] == 1024
    assert "1K \\[1K, 1K\\]" in (folder / "summary.md").read_text()
    assert len(list((folder / "latex").glob("numbers-nll.tex"))) == 1
    assert "One number per curve" in (folder / "index.html").read_text()
