"""What a run prints: few lines, every length once, and lm-eval's table for what has no lengths."""

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbeval.errors import time_text
from sbeval.results.intervals import change_text, with_interval
from sbeval.results.records import metric_key
from sbeval.results.terminal import compact_table

LENGTHS = [256, 1024, 4096, 16384]


def perplexity(lengths: list[int], interval: tuple[float, float] | None = (1.9, 2.1)) -> dict[str, Any]:
    values: dict[str, Any] = {"alias": "x"}
    for length in lengths:
        for metric in ("nll", "token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"):
            values[f"{metric_key(metric, length)},none"] = 2.0 + length / 1e5
            values[f"{metric_key(f'{metric}_ci95', length)},none"] = interval
        values[f"{metric_key('tokens', length)},none"] = 4096
    return values


def printed(tasks: dict[str, dict[str, Any]], **more: Any) -> str:
    return compact_table({"results": tasks, **more}, lambda rest: f"others: {', '.join(rest['results'])}")


def test_four_lengths_take_four_rows_however_many_metrics_there_are() -> None:
    table = printed({"sb_stdlib_fixed_target": perplexity(LENGTHS), "sb_stdlib_stream": perplexity(LENGTHS)})
    assert len(table.splitlines()) == 2 + len(LENGTHS)
    assert max(map(len, table.splitlines())) <= 80
    assert "sb_stdlib_fixed_target" in table.splitlines()[1]
    assert re.search(r"^ *16,384 +2\.164 \[1\.900, 2\.100\] +2\.164 \[1\.900, 2\.100\]$", table, flags=re.M)


def test_an_interval_of_two_thousandths_is_shown_with_two_digits_of_its_width() -> None:
    table = printed({"sb_stdlib_stream": perplexity(LENGTHS, (2.0013, 2.0034)), "sb_text_rolling": perplexity(LENGTHS)})
    assert re.search(r"^ *256 +2\.0026 \[2\.0013, 2\.0034\] +2\.003 \[1\.900, 2\.100\]$", table, flags=re.M)


def test_a_missing_interval_says_what_it_takes_and_a_missing_length_is_no_number() -> None:
    lines = printed({"sb_text_stream": perplexity([256], None), "sb_text_rolling": perplexity([1024])}).splitlines()
    assert (lines[2].split(), lines[3].split()[:2]) == (["256", "2.003", "-"], ["1,024", "-"])
    assert lines[-1] == "no interval: it needs 20 documents"


def test_scores_take_a_row_a_task_and_length_a_column() -> None:
    tasks = {
        "sb_niah_single_1": {f"{metric_key('score', length)},none": 1.0 for length in LENGTHS}
        | {f"{metric_key('score', length)}_stderr,none": 0.1 for length in LENGTHS},
        "sb_mqrar": {f"exact_match_32_pairs@{768:07d},none": 0.5, f"answer_nll_32_pairs@{768:07d},none": 3.0},
    }
    lines = printed(tasks).splitlines()
    assert lines[0].split() == ["score", "at", "context", "256", "768", "1,024", "4,096", "16,384"]
    assert lines[1].split() == ["sb_niah_single_1", "1.000", "-", "1.000", "1.000", "1.000"]
    assert lines[2].split() == ["sb_mqrar,", "32", "pairs", "-", "0.500", "-", "-", "-"]
    assert len(lines) == 3


def test_what_has_no_context_lengths_stays_in_lm_evals_table() -> None:
    table = printed({"piqa": {"acc,none": 0.5}, "sb_text_stream": perplexity([256])})
    assert table.endswith("others: piqa")
    assert "acc" not in table


def test_groups_that_stand_among_the_results_are_not_shown_twice() -> None:
    scores = {f"{metric_key('score', length)},none": 0.5 for length in LENGTHS}
    results = {"results": {"sb_ruler": scores}, "groups": {"sb_ruler": scores}}
    assert compact_table(results, lambda rest: "others", "groups") == ""


def test_a_group_without_numbers_has_no_table() -> None:
    stream = {"sb_stdlib_stream": perplexity([256])}
    assert printed(stream | {"sb_stdlib": {"alias": "sb_stdlib", "name": "sb_stdlib"}}) == printed(stream)


@given(
    st.dictionaries(
        st.sampled_from(["a", "sb_text_stream", "sb_a_very_long_name_of_a_task_of_this_kind", "b"]),
        st.dictionaries(st.sampled_from(LENGTHS), st.one_of(st.none(), st.floats(), st.just("N/A")), min_size=1),
        min_size=1,
    )
)
@pytest.mark.parametrize("metric", ["nll", "score"])
def test_any_values_give_columns_below_each_other(metric: str, values: dict[str, dict[int, Any]]) -> None:
    keys = {length: f"{metric_key(metric, length)},none" for length in LENGTHS}
    tasks = {name: {keys[length]: value for length, value in own.items()} for name, own in values.items()}
    table = printed(tasks)
    lengths = {length for own in values.values() for length in own}
    for block in table.split("\n\n"):
        rows = [line for line in block.splitlines() if not line.startswith(("NLL", "no interval"))]
        assert len({len(row) for row in rows}) == 1
    assert all(f"{length:,}" in table for length in lengths)
    assert "nan" not in table


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


def test_needles_that_are_not_there_have_a_row_for_each_share() -> None:
    names = ("found", "said_absent", "invented", "none_margin_there")
    row = {f"{metric_key(name, 4096)},none": place / 4 for place, name in enumerate(names)}
    lines = printed({"sb_niah_single_1": row}).splitlines()
    assert [line.split("   ")[0].strip() for line in lines[1:]] == [
        *("sb_niah_single_1, found", "sb_niah_single_1, said absent", "sb_niah_single_1, invented")
    ]
    assert [line.split()[-1] for line in lines[1:]] == ["0.000", "0.250", "0.500"]


def test_the_relative_error_of_counts_has_a_row() -> None:
    values = {"score": 0.25, "relative_error": 0.5, "chance": 0.1, "chance_relative_error": 0.4}
    row = {f"{metric_key(name, 256)},none": value for name, value in values.items()}
    _, score, error = printed({"sb_tally_count": row}).splitlines()
    assert (score.split(), error.split()) == (
        ["sb_tally_count", "0.250"],
        ["sb_tally_count,", "relative", "error", "0.500"],
    )
