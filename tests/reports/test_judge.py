"""Comparing and judging two models: what is worse, by which rule, and what cannot be judged."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from document_sums import sums
from experiment_files import LENGTHS
from result_files import CURVES, model_record, ordinary_task, perplexity_task, ruler_task, write_pair, write_run
from typer.testing import CliRunner

from sbeval.commands.cli import app
from sbeval.errors import UserError
from sbeval.policy import FAIL_IF_WORSE, Rule, read_policy
from sbeval.reports import compare, gate, load_results
from sbeval.reports.analyse.panels import perplexity_panels
from sbeval.reports.judge import Judged, judge
from sbeval.reports.pairs import Difference, Measured, text_differences

TEXT, RULER_TASK = "sb_stdlib_fixed_target", "sb_ruler_vt"


def write(folder: Path, shift: float = 0.0, **changes: object) -> Path:
    """Writes one text of a model that is worse by a shift at every length."""
    curve = [value + shift for value in CURVES["stickbreaking"]]
    model = model_record("stickbreaking", checkpoint_sha256=f"{abs(shift):.3f}".ljust(64, "0"))
    write_run(folder, model, [perplexity_task("fixed_target", curve, **changes)])  # type: ignore[arg-type]
    return folder


def pair(tmp_path: Path, shift: float, **changes: object) -> tuple[Path, Path]:
    return write(tmp_path / "a"), write(tmp_path / "b", shift, **changes)


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


def test_a_checkpoint_that_got_worse_is_found_at_every_length(tmp_path: Path) -> None:
    comparison = compare(*pair(tmp_path, 0.05))
    assert comparison.worse
    *lengths, beyond = comparison.lengths
    assert all(number.worse for number in lengths)
    assert [number.estimate for number in lengths] == pytest.approx([0.05] * 9, abs=0.015)
    # equally worse at every length, so no worse beyond the training length than at it
    assert beyond.context_length_tokens is None
    assert beyond.low < 0 < beyond.high
    assert "worse" in comparison.text()


def test_what_is_left_out_is_said_beside_a_comparison(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = pair(tmp_path, 0.05)
    (file,) = folders[1].glob("samples_*.jsonl")
    first, *others = map(json.loads, file.read_text().splitlines())
    first["nll@0002048"][0][1] = 2**63
    file.write_text("".join(json.dumps(sample) + "\n" for sample in (first, *others)))
    compare(*folders)
    assert f"{file}: samples at 2K do not add up to the results file's numbers and were left out" in caplog.text


def test_a_better_checkpoint_and_the_same_results_are_not_worse(tmp_path: Path) -> None:
    folders = pair(tmp_path, -0.05)
    better, same = compare(*folders), compare(folders[0], folders[0])
    assert not better.worse
    assert all(number.better for number in better.lengths if number.context_length_tokens)
    assert not same.worse
    assert {number.estimate for number in same.lengths} == {0.0}


def test_a_page_and_a_comparison_say_what_a_model_was_trained_on(tmp_path: Path) -> None:
    seen = ["lib/a.py", "lib/b.py", "lib/c.py", "lib/d.py"]
    folders = pair(tmp_path, -0.5, seen_documents=seen)
    remark = (
        "trained on at least 4 of the documents (lib/a.py, lib/b.py, lib/c.py and 1 more), and may have memorised them"
    )
    assert remark in compare(*folders).text()
    (panel,) = perplexity_panels((results := load_results(folders)).measurements, results.models)
    assert [said.endswith(f"{remark}.") for said in panel.remarks] == [True]
    assert "by heart" not in compare(folders[0], folders[0]).text()


def test_models_can_be_named_within_one_folder(tmp_path: Path) -> None:
    write_pair(tmp_path, "stream")
    comparison = compare("demo-sb", "demo-rope", paths=[tmp_path])
    assert comparison.worse
    assert [number.worse for number in comparison.lengths if (number.context_length_tokens or 0) >= 2048] == [True] * 6
    with pytest.raises(UserError, match="demo-sb"):
        compare("demo-sb", "nothing", paths=[tmp_path])


def test_ruler_and_ordinary_tasks_are_judged_in_their_own_direction(tmp_path: Path) -> None:
    for attention, level, reach in (("rope", 0.5, 1024), ("stickbreaking", 0.6, 5024)):
        tasks = [ruler_task("sb_niah_single_1", reach, lengths=LENGTHS[2:6], repeats=9)]
        tasks.append(ordinary_task("piqa", "acc", level, samples=400))
        write_run(tmp_path / attention, model_record(attention), tasks)
    names = ("demo-rope", "demo-sb")
    better, worse = (compare(*pair, paths=[tmp_path]) for pair in (names, names[::-1]))
    assert not better.worse
    assert {score.name.split(",")[0] for score in better.scores if score.better} == {"", "piqa"}
    assert worse.worse
    assert "RULER, mean over 1 task" in worse.text()


def test_other_tokenizers_are_compared_in_bits_per_byte(tmp_path: Path) -> None:
    comparison = compare(*pair(tmp_path, 0.1, tokenizer_sha256="ab" * 32))
    assert {number.unit for number in comparison.lengths} == {"bits per byte"}


def test_texts_without_a_hash_are_known_by_their_names_and_other_texts_are_refused(tmp_path: Path) -> None:
    for side, shift in (("c", 0.0), ("d", 0.05)):
        curve = [value + shift for value in CURVES["rope"]]
        tasks = [perplexity_task("stream", curve, corpus=corpus, corpus_sha256=None) for corpus in ("one", "other")]
        write_run(tmp_path / side, model_record("rope", checkpoint_sha256=side * 64), tasks)
    comparison = compare(tmp_path / "c", tmp_path / "d")
    assert {number.group for number in comparison.lengths} == {"one, stream", "other, stream"}
    with pytest.raises(UserError, match="texts differ"):
        compare(*pair(tmp_path, 0.1, corpus_sha256="dd" * 32))


@pytest.mark.parametrize("documents", [1, 12])
def test_too_few_documents_give_differences_without_intervals_or_verdicts(tmp_path: Path, documents: int) -> None:
    folders = [write(tmp_path / name, shift, documents=documents) for name, shift in (("a", 0.0), ("b", 0.4))]
    comparison = compare(*folders)
    assert [number.estimate for number in comparison.lengths[:-1]] == pytest.approx([0.4] * 9, abs=0.06)
    assert all(math.isnan(number.low) for number in comparison.lengths)
    assert (comparison.can_be_judged, comparison.worse) == (False, False)
    text = comparison.text()
    assert f"{documents} document{'s' if documents > 1 else ''};" in text
    assert "no intervals and no verdicts: they need 20 documents" in text
    assert "nan" not in text
    assert not re.search(r"(worse|better)$", text, flags=re.M)


def test_a_difference_that_is_certain_and_small_does_not_count(tmp_path: Path) -> None:
    folders = pair(tmp_path, 0.05)
    assert compare(*folders, least_effect=0.0).worse
    small = compare(*folders, least_effect=0.1)
    assert not small.worse
    assert all(number.worse for number in small.lengths if number.context_length_tokens)
    assert "too little to count" in small.text()


def test_a_model_that_breaks_is_worse_only_by_a_good_part_of_what_the_reference_loses(tmp_path: Path) -> None:
    def rope(name: str, at_the_end: float) -> Path:
        curve = [value + (at_the_end if index >= 5 else 0.0) for index, value in enumerate(CURVES["rope"])]
        record = model_record("rope", checkpoint_sha256=name * 64)
        write_run(tmp_path / name, record, [perplexity_task("fixed_target", curve)])
        return tmp_path / name

    reference = rope("a", 0.0)
    alike, far = compare(reference, rope("b", 0.15)), compare(reference, rope("c", 1.5))
    assert any(number.worse for number in alike.lengths)
    assert not alike.worse
    assert far.worse


def test_a_candidate_that_breaks_has_a_worse_mean_and_a_shorter_effective_length(tmp_path: Path) -> None:
    comparison = compare(written(tmp_path / "a"), written(tmp_path / "b", longest=0.5, at=5))
    (beyond,) = [number for number in comparison.lengths if number.context_length_tokens is None]
    # from 4K to 64K are four of the six octaves, and half of the one before
    assert beyond.estimate == pytest.approx(0.5 * 4.5 / 6, abs=0.01)
    assert beyond.worse
    (effective,) = comparison.effective
    # at most 2K, where the reference has at least 8K
    assert effective.change[1] == 2
    assert f"{effective.name}  worse" in comparison.text().splitlines()
    assert not any(number.worse for number in compare(tmp_path / "a", tmp_path / "a").effective)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.0, 0.1, "pass"), (0.05, 0.11, "not enough data"), (0.11, 0.2, "fail"), (math.nan, math.nan, "not enough data")],
)
def test_a_verdict_needs_the_whole_interval_on_one_side(low: float, high: float, verdict: str) -> None:
    rule = Rule(task="x", largest_change=0.1)
    assert Judged(rule=rule, name="x", low=low, high=high, allowed=0.1).verdict == verdict


def test_documents_of_uneven_sizes_can_fail_a_rule_and_never_pass_it(tmp_path: Path) -> None:
    rule = Rule(task=TEXT, length=4096, largest_change=1.0)
    even, uneven = write(tmp_path / "even"), write(tmp_path / "uneven", size_log_deviation=1.6)
    (passed,) = gate([rule], even, even).judged
    assert passed.verdict == "pass"
    (doubtful,) = gate([rule], uneven, uneven).judged
    assert (doubtful.high, doubtful.verdict) == (0.0, "not enough data")
    assert "differ much in size" in doubtful.text
    (failed,) = gate([rule], uneven, write(tmp_path / "worse", 9.0, size_log_deviation=1.6)).judged
    assert (failed.verdict, failed.doubtful) == ("fail", True)
    for folder, end in ((even, "allowed"), (uneven, "but bands are doubtful, see above")):
        ended = CliRunner().invoke(app, ["report", "--compare", str(folder), str(folder), "--fail-if-worse"])
        assert (ended.exit_code, ended.stdout.strip().endswith(end)) == (0, True)


def test_a_number_whose_better_direction_is_unknown_gets_no_verdict() -> None:
    number = Difference(group="x", unit="score", count=99, estimate=0.5, low=0.4, high=0.6, higher_is_better=None)
    verdict = judge(Rule(task="x", largest_change=1.0), "x", number)
    assert (verdict.verdict, verdict.reason) == ("not enough data", "it is not recorded which way is better")


def judged(tmp_path: Path, rules: str, **changes: Any) -> dict[str, Judged]:
    (tmp_path / "gate.yaml").write_text(f"rules:\n{rules}")
    found = gate(read_policy(tmp_path / "gate.yaml"), written(tmp_path / "a"), written(tmp_path / "b", **changes))
    return {judgement.name: judgement for judgement in found.judged}


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
    assert {judgement.verdict for judgement in found.values()} == {"pass"}


def test_a_rule_fails_for_its_own_length_or_task_alone(tmp_path: Path) -> None:
    found = judged(tmp_path, RULES, longest=0.3, right=0.4)
    assert (found[f"{TEXT} at 64K"].verdict, found[f"{TEXT} at 1K"].verdict) == ("fail", "pass")
    # from 1K to 64K, the two longest lengths hold a quarter of the octaves
    assert found[f"{TEXT}, mean over octaves"].change == pytest.approx(0.3 / 4, abs=0.01)
    # fewer right answers are worse
    assert found["hellaswag acc_norm"].change == pytest.approx(0.2)
    assert found["hellaswag acc_norm"].verdict == "fail"


def test_a_limit_within_the_interval_is_neither_passed_nor_failed(tmp_path: Path) -> None:
    rules = f"  - {{task: {TEXT}, length: 65536, largest_change: 0.1}}\n"
    found = judged(tmp_path, rules, shift=0.1)[f"{TEXT} at 64K"]
    assert found.low < 0.1 < found.high
    assert found.verdict == "not enough data"


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("task: sb_nothing, largest_change: 0.1", "neither has run this task; there are "),
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


def test_bands_are_wider_where_more_is_compared_or_asked_at_once(tmp_path: Path) -> None:
    folders = written(tmp_path / "a"), written(tmp_path / "b", shift=0.1)
    text = Rule(task=TEXT, length=65536, largest_change=0.05)
    answers = Rule(task="hellaswag", metric="acc_norm", largest_change=1)
    others = ((), (answers,), (answers, *read_policy(FAIL_IF_WORSE)))
    firsts = [gate([text, *more], *folders).judged[0] for more in others]
    assert len({first.change for first in firsts}) == 1
    alone, two, more = (first.high - first.low for first in firsts)
    assert two > 1.05 * alone
    assert more > 1.05 * two


def test_the_policy_that_ships_judges_every_number_as_the_comparison_does(tmp_path: Path) -> None:
    folders = written(tmp_path / "a"), written(tmp_path / "b", longest=0.5, at=5)
    comparison, found = compare(*folders), gate(read_policy(FAIL_IF_WORSE), *folders)
    assert list(found.judged) == comparison.verdicts
    assert comparison.worse
    assert found.verdict == "fail"
    assert {"stdlib, fixed_target, 64K", comparison.effective[0].name} <= {
        judgement.name for judgement in found.judged if judgement.verdict == "fail"
    }
    with pytest.raises(UserError, match="name the task"):
        gate([Rule(task="*", length="mean", largest_change=1)], *folders)


def test_rules_are_read_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "gate.yaml").write_text("rules:\n  - {task: ruler, length: mean, largest_change: '0.02'}")
    assert read_policy(tmp_path / "gate.yaml") == (Rule(task="ruler", length="mean", largest_change=0.02),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rules:\n  - {task: x, largest_chnage: 1}", "did you mean 'largest_change'"),
        ("rules:\n  - {task: x, largest_change: -1}", "a number of 0 or more"),
        ("rules:\n  - {task: x, length: long, largest_change: 1}", "a positive number of tokens, or mean"),
        (
            "rules:\n  - {task: x, largest_change: 1}\n  - {foo: 3}",
            "keys that rule 2 of the policy has, found unknown key",
        ),
        ("rules:\n  - {task: x}", "Expected largest_change of rule 1 of the policy, found none: add it in gate.yaml"),
        ("rules:\n  - {task: x, largest_change: a}", "Expected largest_change of rule 1 of the policy to be a number"),
        ("rules: []", "gate.yaml holds no rules"),
        ("rules: 3", "Expected rules of the policy to be a list, found 3"),
        ("- 1", "settings of a policy .* found a list"),
        ("", "settings of a policy .* found an empty file"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "gate.yaml").write_text(text)
    with pytest.raises(UserError, match=words) as raised:
        read_policy(tmp_path / "gate.yaml")
    assert "\n" not in str(raised.value)


def test_models_scored_on_different_targets_are_not_compared() -> None:
    """Even if every document has equally many targets."""
    first, second = (sums([2.0, 1.9, 1.8, 1.7, 1.6], seed=seed) for seed in (0, 0))
    first.blocks = {name: frozenset({(100, 164)}) for name in first.clusters}
    texts = [
        Measured(corpus="c", corpus_sha256="c", protocol="fixed_target", tokenizer_sha256="t", sums=sums_of)
        for sums_of in (first, second)
    ]
    second.blocks = first.blocks
    assert text_differences(texts[:1], texts[1:], confidence=0.95)[0]
    second.blocks = {name: frozenset({(200, 264)}) for name in first.clusters}
    differences, (obstacle,) = text_differences(texts[:1], texts[1:], confidence=0.95)
    assert not differences
    assert "identical targets" in obstacle


@pytest.mark.parametrize(("alike", "known"), [(0, True), (10, True), (40, True), (0, False), (3, False), (40, False)])
def test_two_tokenizers_are_compared_on_documents_whose_targets_are_the_same_text(alike: int, known: bool) -> None:
    """Targets are compared by their first and last byte; otherwise a few targets of equal size match by chance."""
    first, second = (sums([2.0, 1.9, 1.8, 1.7, 1.6], seed=0) for _ in range(2))
    names = first.clusters
    if known:
        first.byte_blocks = {name: frozenset({(100, 700)}) for name in names}
        others = {name: frozenset({(130, 730)}) for name in names[alike:]}
        second.byte_blocks = first.byte_blocks | others
    else:
        second.bytes[alike:] += 30
    texts = [
        Measured(corpus="c", corpus_sha256="c", protocol="fixed_target", tokenizer_sha256=name, sums=held)
        for name, held in (("t", first), ("u", second))
    ]
    differences, said = text_differences(texts[:1], texts[1:], confidence=0.95)
    if alike < (1 if known else 20):
        assert not differences
        assert "the tokenizers differ" in said[0]
        assert "rolling compares the two in bits per byte" in said[0]
    else:
        assert {(number.unit, number.count) for number in differences} == {("bits per byte", alike)}
        share = f"{alike} of 40 documents ({alike / 40:.0%}) are compared"
        assert [share in remark for remark in said] == [True] * known


@pytest.mark.exhaustive
def test_a_gate_over_two_tokenizers_says_what_helps_and_asks_for_no_more_data(tmp_path: Path) -> None:
    tokens = {"a": {}, "b": {"tokenizer_sha256": "ab" * 32}}
    for name, record in tokens.items():
        curve = [value + (name == "b") * 0.3 for value in CURVES["rope"]]
        tasks = [perplexity_task("rolling", curve, **record), perplexity_task("fixed_target", curve, **record)]
        if name == "b":
            for sample in tasks[1][3]:
                for key in (key for key in sample if key.startswith("nll@")):
                    sample[key] = [[*row[:4], row[4] + place] for place, row in enumerate(sample[key], start=1)]
            tasks[1][1].update({key: None for key in tasks[1][1] if key.startswith("bits_per_byte")})
        write_run(tmp_path / name, model_record("rope", checkpoint_sha256=name * 64), tasks)
    rules = [
        f"  - {{task: {TEXT}, length: 4096, largest_change: 0.1}}\n",
        "  - {task: sb_stdlib_rolling, length: 4096, largest_change: 0.1}\n",
        "  - {task: sb_stdlib_rolling, length: 4096, largest_change: 0.01, metric: bits_per_byte}\n",
        "  - {task: sb_stdlib_rolling, length: 4096, largest_change: 1, metric: bits_per_byte}\n",
    ]
    words = [
        "rolling compares the two in bits per byte",
        "the tokenizers differ, and the unit is bits per byte: add metric: bits_per_byte to the rule",
        "fail: sb_stdlib_rolling bits_per_byte at 4K",
        "pass: sb_stdlib_rolling bits_per_byte at 4K",
    ]
    for rule, said, code in zip(rules, words, (3, 3, 1, 0), strict=True):
        (tmp_path / "gate.yaml").write_text(f"rules:\n{rule}")
        pair = [str(tmp_path / name) for name in tokens]
        ended = CliRunner().invoke(app, ["report", "--compare", *pair, "--gate", str(tmp_path / "gate.yaml")])
        assert (ended.exit_code, said in ended.output) == (code, True), ended.output
        assert "not enough data" not in ended.output
        assert ("not comparable" in ended.output) == (code == 3)
    lines = compare(*pair).text()
    assert "stdlib, rolling (bits per byte, 60 documents" in lines
    assert "stdlib, fixed_target: not compared, because the tokenizers differ" in lines
    results = load_results(pair)
    panels = perplexity_panels(results.measurements, results.models)
    (panel,) = (panel for panel in panels if panel.protocol == "fixed_target")
    assert "rolling scores the same text under every tokenizer" in " ".join(panel.remarks)
