import math
from pathlib import Path
from typing import Any

import pytest
from result_files import CURVES, model_record, ordinary_task, perplexity_task, ruler_task, write_run

from sbeval.policy import read_policy
from sbeval.reports import compare, gate
from sbeval.reports.gate import Judged, Rule

TEXT, RULER_TASK = "sb_stdlib_fixed_target", "sb_ruler_vt"


def written(folder: Path, *, shift: float = 0.0, longest: float = 0.0, at: int = 2, right: float = 0.6) -> Path:
    """Writes one model: worse by `shift` everywhere, by `longest` at the `at` longest lengths, with right answers."""
    curve = [value + shift for value in CURVES["stickbreaking"]]
    curve[-at:] = [value + longest for value in curve[-at:]]
    tasks = [
        perplexity_task("fixed_target", curve),
        ordinary_task("hellaswag", "acc_norm", right, samples=300),
        ruler_task(RULER_TASK, 8192),
    ]
    write_run(folder, model_record("stickbreaking", checkpoint_sha256=folder.name[0] * 64), tasks)
    return folder


def judged(tmp_path: Path, rules: str, **changes: Any) -> dict[str, Judged]:
    (tmp_path / "gate.yaml").write_text(f"rules:\n{rules}")
    read = [Rule(**settings) for settings in read_policy(tmp_path / "gate.yaml")]
    found = gate(read, written(tmp_path / "a"), written(tmp_path / "b", **changes))
    return {one.rule.name: one for one in found.judged}


RULES = f"""
  - {{task: {TEXT}, length: 65536, largest_change: 0.05}}
  - {{task: {TEXT}, length: 1024, largest_change: 0.05}}
  - {{task: {TEXT}, length: mean, largest_change: 0.05}}
  - {{task: hellaswag, metric: acc_norm, largest_change: 0.1}}
  - {{task: ruler, length: mean, largest_change: 0.2}}
  - {{task: {RULER_TASK}, length: 4096, largest_change: 0.2}}
"""


def test_equal_models_pass_where_the_allowed_change_is_beyond_their_spread(tmp_path: Path) -> None:
    found = judged(tmp_path, RULES)
    assert len(found) == 6
    assert {one.verdict for one in found.values()} == {"pass"}


def test_a_rule_fails_for_its_own_length_alone(tmp_path: Path) -> None:
    found = judged(tmp_path, RULES, longest=0.3)
    assert found[f"{TEXT} at 64K"].verdict == "fail"
    assert found[f"{TEXT} at 1K"].verdict == "pass"
    # from 1K to 64K, the two longest lengths hold a quarter of the octaves
    assert found[f"{TEXT}, mean over octaves"].change == pytest.approx(0.3 / 4, abs=0.01)


def test_fewer_right_answers_are_a_change_for_the_worse(tmp_path: Path) -> None:
    found = judged(tmp_path, RULES, right=0.4)["hellaswag acc_norm"]
    assert found.change == pytest.approx(0.2)
    assert found.verdict == "fail"


def test_a_limit_within_the_interval_is_neither_passed_nor_failed(tmp_path: Path) -> None:
    rules = f"  - {{task: {TEXT}, length: 65536, largest_change: 0.1}}\n"
    found = judged(tmp_path, rules, shift=0.1)[f"{TEXT} at 64K"]
    assert found.low < 0.1 < found.high
    assert found.verdict == "not enough data"


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("task: sb_nothing, largest_change: 0.1", "no logged samples"),
        (f"task: {TEXT}, length: 100, largest_change: 0.1", "not measured at this length"),
        (f"task: {TEXT}, largest_change: 0.1", "not measured at this length"),
        ("task: hellaswag, metric: acc, largest_change: 0.1", "not measured on the same samples"),
    ],
)
def test_what_was_not_measured_is_not_enough_data_and_says_why(tmp_path: Path, rule: str, reason: str) -> None:
    (found,) = judged(tmp_path, f"  - {{{rule}}}\n").values()
    assert found.verdict == "not enough data"
    assert math.isnan(found.change)
    assert reason in found.reason


def test_intervals_widen_with_the_tasks_a_policy_asks_about(tmp_path: Path) -> None:
    alone = judged(tmp_path, f"  - {{task: {TEXT}, length: 65536, largest_change: 0.05}}\n", shift=0.1)
    among = judged(tmp_path, RULES, shift=0.1)
    one, other = (found[f"{TEXT} at 64K"] for found in (alone, among))
    assert one.change == other.change
    assert other.high - other.low > 1.1 * (one.high - one.low)


def test_a_verdict_needs_the_whole_interval_on_one_side() -> None:
    rule = Rule(task="x", largest_change=0.1)
    ends = {(0.0, 0.1): "pass", (0.05, 0.11): "not enough data", (0.11, 0.2): "fail", (math.nan, math.nan): None}
    for (low, high), verdict in ends.items():
        assert Judged(rule=rule, low=low, high=high).verdict == (verdict or "not enough data")


def test_a_candidate_that_breaks_has_a_worse_mean_and_a_shorter_effective_length(tmp_path: Path) -> None:
    comparison = compare(written(tmp_path / "a"), written(tmp_path / "b", longest=0.5, at=5))
    (beyond,) = [one for one in comparison.lengths if one.context_length_tokens is None]
    # from 4K to 64K are four of the six octaves, and half of the one before
    assert beyond.estimate == pytest.approx(0.5 * 4.5 / 6, abs=0.01)
    assert beyond.worse
    (effective,) = comparison.effective
    assert effective.worse
    assert (effective.candidate.high, effective.reference.low) == (2048, 8192)
    assert "effective length" in comparison.text()
    assert not any(one.worse for one in compare(tmp_path / "a", tmp_path / "a").effective)
