import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from result_files import RULER_TASKS, model_record, reported, ruler_task, text_of, write_run

from sbeval.reports import load_results
from sbeval.reports.analyse import ruler
from sbeval.reports.analyse.statistics import mean_interval, wilson_interval

SHORT = [512, 1024, 4096]


def test_a_task_has_one_name_whoever_runs_it():
    assert {ruler.short_name(task) for task in ("vt", "ruler_vt", "sb_ruler_vt")} == {"vt"}


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
def test_rulers_rule_stops_at_the_first_length_below_the_threshold(scores, text):
    assert ruler.absolute_effective_length(scores).text == text


@pytest.mark.exhaustive
def test_missing_tasks_are_named_in_the_summary_and_leave_the_own_length(tmp_path):
    tasks = [ruler_task(name, 4000, lengths=SHORT) for name in RULER_TASKS[:-2]]
    write_run(tmp_path / "r", model_record("stickbreaking"), tasks)
    summary = text_of(tmp_path / "r")
    assert "n/a (it needs all 13 tasks, and 2 were not run) at the benchmark's threshold" in summary
    assert "at 85% of its own short-context score over the 11 of 13 tasks run" in summary
    assert r"Missing of RULER's 13 tasks: qa\_squad and qa\_hotpot for demo-sb." in summary
    assert "| demo-sb | 11 of 13 |" in summary
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert '<td class="missing">not all 13 tasks</td>' in page
    assert "RULER, 11 of 13 tasks" in page


def ran(**tasks: list[str]) -> pd.DataFrame:
    return pd.DataFrame([{"setting": one, "ruler_task": task} for one, own in tasks.items() for task in own])


def test_lines_on_one_axis_are_means_over_the_same_tasks():
    both = ruler.averaged_alike(ran(a=["vt", "cwe", "fwe"], b=["vt", "fwe"]), ["vt", "cwe", "fwe"])
    assert [one.tasks for one in both] == [("vt", "cwe", "fwe"), ("vt", "fwe")]
    assert [set(one.scores["setting"]) for one in both] == [{"a"}, {"a", "b"}]
    assert "did not run them all: b." in both[0].explanation
    assert both[1].explanation == "Mean over vt, fwe: the 2 of 3 tasks every model here ran."
    assert [one.tasks for one in ruler.averaged_alike(ran(a=["vt"], b=["vt"]), ["vt"])] == [("vt",)]
    assert ruler.averaged_alike(ran(a=["vt"], b=["cwe"]), ["vt", "cwe"]) == []


def test_one_task_alone_is_drawn_once(tmp_path):
    write_run(tmp_path, model_record("rope"), [ruler_task("sb_niah_single_1", 1024)])
    (section,) = [section for section in reported(tmp_path).sections if section.identifier == "ruler"]
    assert [figure.caption.title for figure in section.figures] == ["RULER, 1 of 13 tasks"]


def test_a_task_run_both_ways_counts_once(tmp_path):
    write_run(tmp_path, model_record("rope"), [ruler_task("sb_ruler_vt", 4000), ruler_task("ruler_vt", 99, seed=1)])
    scores = ruler.ruler_scores(load_results([tmp_path]).measurements)
    assert set(scores["task"]) == {"sb_ruler_vt"}
    assert not scores["context_length_tokens"].duplicated().any()


@pytest.mark.exhaustive
def test_the_share_of_aliases_is_no_part_of_rulers_averages(tmp_path):
    names = [name for name in RULER_TASKS if "qa_" not in name]
    tasks = [ruler_task(name, 4000, lengths=SHORT) for name in (*names, "ruler_qa_squad", "qa_hotpot")]
    write_run(tmp_path / "r", model_record("stickbreaking"), tasks)
    found = ruler.rate_ruler(load_results([tmp_path / "r"]).measurements, {"demo-sb": 1024})
    assert set(found.overall["tasks"]) == {12}
    assert ruler.missing_tasks(found.scores, "demo-sb") == ("qa_squad",)
    assert ruler.apart(found.scores) == {"demo-sb": ("ruler_qa_squad",)}
    summary = text_of(tmp_path / "r")
    assert "Left out of RULER's averages: ruler\\_qa\\_squad for demo-sb" in summary
    assert r"demo-sb ruler\_qa\_squad" in summary


def test_prompts_filled_by_unequal_rules_are_named(tmp_path):
    ours, theirs = ruler_task("sb_ruler_vt", 4000), ruler_task("sb_ruler_vt", 4000)
    theirs[2]["scripts"] = "nvidia"
    for attention, task in (("rope", ours), ("stickbreaking", theirs)):
        write_run(tmp_path / "r" / attention, model_record(attention), [task])
    assert ruler.filled_by(load_results([tmp_path / "r" / "rope"]).models) == {"sbeval": ("demo-rope",)}
    assert "so these scores are not comparable: nvidia for demo-sb; sbeval for demo-rope." in text_of(tmp_path / "r")


@pytest.mark.parametrize(
    ("scores", "trained", "text", "reason"),
    [
        ({256: 0.2, 512: 0.40, 1024: 0.39, 2048: 0.35, 4096: 0.33}, 1024, "2K", ""),
        ({512: 0.05, 1024: 0.05}, 1024, "n/a", "near chance"),
        ({512: 0.9}, None, "n/a", "not recorded"),
        ({512: 0.9}, 256, "n/a", "no score at 128"),
    ],
)
def test_the_relative_length_starts_from_half_the_training_length_or_says_why_not(scores, trained, text, reason):
    length = ruler.relative_effective_length(scores, trained)
    assert length.text == text
    assert reason in length.reason


def planted(lengths, true, *, samples, seed):
    """Means of 13 tasks of right or wrong answers whose true scores are known, with the ends of their intervals."""
    random = np.random.default_rng(seed)
    rows = []
    for length, score in zip(lengths, true, strict=True):
        shares = random.binomial(samples, score, len(ruler.TASKS)) / samples
        lows, highs = wilson_interval(shares, np.full(len(shares), samples))
        low, high = mean_interval(shares, lows, highs)
        rows.append((length, shares.mean(), low, high))
    return tuple({row[0]: row[place] for row in rows} for place in (1, 2, 3))


def test_the_interval_of_an_effective_length_holds_the_true_one_where_the_number_often_does_not():
    lengths, true = [4096, 8192, 16384, 32768], [0.93, 0.90, 0.87, 0.80]
    order = ["<4K", "4K", "8K", "16K", ">32K"]
    wrong = {"absolute": 0, "relative": 0}
    missed = dict(wrong)
    for seed in range(200):
        means, low, high = planted(lengths, true, samples=25, seed=seed)
        found = {
            "absolute": (ruler.absolute_effective_length(means, ends=(low, high)), "16K"),
            "relative": (ruler.relative_effective_length(means, 8192, (low, high)), ">32K"),
        }
        for name, (length, truth) in found.items():
            ends = [order.index(end) if end in order else len(order) - 1 for end in length.interval]
            wrong[name] += length.text != truth
            missed[name] += not ends[0] <= order.index(truth) <= ends[1]
    assert wrong["absolute"] > 20
    assert max(missed.values()) <= 10  # 5 % of 200


def test_the_summary_gives_an_effective_length_with_its_interval(tmp_path):
    write_run(tmp_path / "r", model_record("rope"), [ruler_task(name, 2000, lengths=SHORT) for name in RULER_TASKS])
    (sentence,) = (text for text in reported(tmp_path).findings[0].sentences if text.startswith("Effective length"))
    end = r"(?:[<≥] ?)?\d+K?"
    assert len(re.findall(rf"{end} \[{end}, {end}\] at ", sentence)) == 2


def test_weighted_averages_need_all_six_lengths():
    scores = dict(zip(ruler.WEIGHTED_LENGTHS, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], strict=True))
    increasing, decreasing = ruler.weighted_averages(scores) or (0.0, 0.0)
    assert increasing == pytest.approx((0.9 + 1.6 + 2.1 + 2.4 + 2.5 + 2.4) / 21)
    assert decreasing == pytest.approx((5.4 + 4.0 + 2.8 + 1.8 + 1.0 + 0.4) / 21)
    del scores[65536]
    assert ruler.weighted_averages(scores) is None


def test_an_average_leaves_out_lengths_where_a_task_is_missing():
    rows = [("vt", 4096, 0.4), ("cwe", 4096, 0.6), ("vt", 8192, 0.9)]
    scores = pd.DataFrame(
        [
            {"setting": "m", "ruler_task": task, "context_length_tokens": length, "value": value}
            | {"ci95_low": value - 0.1, "ci95_high": value + 0.2}
            for task, length, value in rows
        ]
    )
    means = ruler.average(scores, ["vt", "cwe"])
    assert means["context_length_tokens"].tolist() == [4096]
    assert means["value"].tolist() == pytest.approx([0.5])
    assert means["ci95_high"].tolist() == pytest.approx([0.5 + 0.2 / 2**0.5])


@given(st.dictionaries(st.sampled_from(ruler.WEIGHTED_LENGTHS), st.floats(0, 1), min_size=1), st.floats(0.1, 1.0))
def test_a_lower_threshold_never_gives_a_shorter_length(scores, threshold):
    order = ["<", *ruler.WEIGHTED_LENGTHS, ">"]

    def rank(text: str) -> int:
        if text[0] in "<>":
            return order.index(text[0])
        return order.index(1024 * int(text.removesuffix("K")))

    strict = ruler.absolute_effective_length(scores, threshold).text
    loose = ruler.absolute_effective_length(scores, threshold / 2).text
    assert rank(loose) >= rank(strict)


@pytest.mark.parametrize("task", ["sb_niah_single_1", "sb_json_kv"])
def test_how_often_thinking_was_cut_is_a_table_with_intervals_and_a_note(task, tmp_path):
    name, results, record, samples = ruler_task(task, 1024, lengths=SHORT)
    for length, cut in zip(SHORT, (0.0, 0.2, 1.0), strict=True):
        results |= {f"thinking_cut@{length:07d},none": cut, f"thinking_cut@{length:07d}_stderr,none": 0.05}
    counts = {"answers": 165, "cut": 3, "thinking_cut": 66, "thinking_stopped": 2, "thinking_tokens": 9}
    model = model_record("rope", generated=counts, thinking_tokens=64)
    write_run(tmp_path / "r", model, [(name, results, record, samples)])
    summary = text_of(tmp_path / "r")
    table = summary[summary.index("Answers before which the model's thinking had to be cut") :]
    assert "20.0% [12.0%, 31.3%]" in table.replace("\\", "").split("\n\n")[1]
    assert "## Notes" in summary
    assert "the model's thinking was cut before 66 of 165 answers (on rank 0)." in summary
    assert "ended its text without ending its thinking before 2 of 165 answers" in summary
    assert "the budget of tokens cut 3 of 165 answers (" in summary
    assert "thinking\\_cut" not in summary
