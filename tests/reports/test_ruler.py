import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbeval.reports.ruler import (
    WEIGHTED_LENGTHS,
    absolute_effective_length,
    average,
    relative_effective_length,
    short_name,
    weighted_averages,
)


@pytest.mark.parametrize("task", ["vt", "ruler_vt", "sb_ruler_vt"])
def test_a_task_has_one_name_whoever_runs_it(task: str) -> None:
    assert short_name(task) == "vt"


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        ({4096: 0.9, 8192: 0.86, 16384: 0.5}, "8K"),
        ({4096: 0.5, 8192: 0.9}, "<4K"),
        ({4096: 0.9, 8192: 0.9}, ">8K"),
        ({4096: 0.9, 8192: 0.85, 16384: 0.9}, "4K"),
        ({}, "n/a"),
    ],
)
def test_rulers_rule_stops_at_the_first_length_below_the_threshold(scores: dict[int, float], text: str) -> None:
    assert absolute_effective_length(scores).text == text


def test_the_relative_length_starts_from_half_the_training_length() -> None:
    scores = {256: 0.2, 512: 0.40, 1024: 0.39, 2048: 0.35, 4096: 0.33}
    assert relative_effective_length(scores, 1024).text == "2K"


def test_a_score_near_chance_has_no_relative_length_and_says_why() -> None:
    length = relative_effective_length({512: 0.05, 1024: 0.05}, 1024)
    assert length.text == "n/a"
    assert "near chance" in length.reason


@pytest.mark.parametrize(("trained", "words"), [(None, "not recorded"), (256, "no score at 128")])
def test_no_base_score_is_said(trained: int | None, words: str) -> None:
    length = relative_effective_length({512: 0.9}, trained)
    assert length.text == "n/a"
    assert words in length.reason


def test_weighted_averages_need_all_six_lengths() -> None:
    scores = dict(zip(WEIGHTED_LENGTHS, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], strict=True))
    increasing, decreasing = weighted_averages(scores) or (0.0, 0.0)
    assert increasing == pytest.approx((0.9 + 1.6 + 2.1 + 2.4 + 2.5 + 2.4) / 21)
    assert decreasing == pytest.approx((5.4 + 4.0 + 2.8 + 1.8 + 1.0 + 0.4) / 21)
    del scores[65536]
    assert weighted_averages(scores) is None


def test_an_average_leaves_out_lengths_where_a_task_is_missing() -> None:
    rows = [("vt", 4096, 0.4), ("cwe", 4096, 0.6), ("vt", 8192, 0.9)]
    scores = pd.DataFrame(
        [
            {"setting": "m", "ruler_task": task, "context_length_tokens": length, "value": value, "stderr": 0.1}
            for task, length, value in rows
        ]
    )
    means = average(scores, ["vt", "cwe"])
    assert means["context_length_tokens"].tolist() == [4096]
    assert means["value"].tolist() == pytest.approx([0.5])
    assert means["ci95_high"].tolist() == pytest.approx([0.5 + 1.96 * 0.1 / 2**0.5])


@given(st.dictionaries(st.sampled_from(WEIGHTED_LENGTHS), st.floats(0, 1), min_size=1), st.floats(0.1, 1.0))
def test_a_lower_threshold_never_gives_a_shorter_length(scores: dict[int, float], threshold: float) -> None:
    order = ["<", *WEIGHTED_LENGTHS, ">"]

    def rank(text: str) -> int:
        if text[0] in "<>":
            return order.index(text[0])
        return order.index(1024 * int(text.removesuffix("K")))

    strict = absolute_effective_length(scores, threshold).text
    loose = absolute_effective_length(scores, threshold / 2).text
    assert rank(loose) >= rank(strict)
