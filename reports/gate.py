"""Judges a candidate model against a reference model by a policy: a file of rules.

A rule names a task and the largest change for the worse that it allows. There are three verdicts. A rule passes if the
whole confidence interval of the change is within the allowed range, and fails if the whole interval is beyond it.
Otherwise the verdict is that there is not enough data. If documents differ so much in size that the interval is
doubtful, a rule can fail but not pass.

The intervals of all rules cover their true changes at once in 95 % of cases: they are simultaneous over the rules of
one task, and tasks are combined by Bonferroni's inequality. The probability that any verdict of a policy is wrong is
therefore at most 5 %, except where a rule fails by a doubtful interval, which its line says. With every true change
exactly at its limit, some rule fails in at most 1.2 % of simulations and some rule passes in 2.1 %
(`research/interval_studies/gates.py`). Passing needs much data: on forty documents, three rules that allow 0.05 nats
more than the true change all pass in 90 % of cases, and rules for six tasks in 17 %.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sbeval.errors import UserError
from sbeval.reports.analyse.statistics import CONFIDENCE, octave_weights
from sbeval.reports.analyse.suite import usual_direction
from sbeval.reports.judge import OVER_OCTAVES, Judged, Verdict, compare, compare_sides, judge, pair_of_models, rules_of
from sbeval.reports.pairs import (
    BITS,
    EVERYTHING,
    NATS,
    OTHER_TOKENIZERS,
    RULER,
    Difference,
    Side,
    WeightedSum,
    paired_differences,
)
from sbeval.reports.read.fields import context_metric, grouped, length_text
from sbeval.reports.read.files import Labels, Paths, Place
from sbeval.reports.read.samples import MetricKey, SampleScores

if TYPE_CHECKING:
    from sbeval.policy import Rule

MEAN = "mean"
_BITS_METRIC = "bits_per_byte"
_USUAL_METRICS = ("score", "exact_match")
_EXIT_CODES = {"pass": 0, "fail": 1, "not enough data": 3, "not comparable": 3}
_WORST_FIRST: tuple[Verdict, ...] = ("fail", "not comparable", "not enough data")


class Gate(NamedTuple):
    """The result of judging a candidate model by a policy: names of both models, and a judged number for each rule."""

    reference: str
    candidate: str
    judged: tuple[Judged, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of any rule. From worst to best: fail, not comparable, not enough data, pass."""
        verdicts = [judged.verdict for judged in self.judged]
        return next((verdict for verdict in _WORST_FIRST if verdict in verdicts), "pass")

    def text(self) -> str:
        """Returns the verdicts as lines of text for a terminal."""
        first = f"{self.candidate} against {self.reference}; above zero is worse; simultaneous 95% intervals"
        return "\n".join([first, *(judged.text for judged in self.judged), f"all rules: {self.verdict}"])


def gate(
    rules: Sequence["Rule"], reference: Place, candidate: Place, *, paths: Paths = (), labels: Labels = None
) -> Gate:
    """Judges a candidate by the rules of a policy.

    Args:
        rules: the rules of the policy.
        reference: folder or file with the results of the reference model, or the name of a model in `paths`.
        candidate: folder, file or name for the model to be judged.
        paths: folders and files with results, in which models are looked up by name.
        labels: name of a model or text to the name shown instead.

    Raises:
        UserError: a name or folder does not identify exactly one model, or a rule has no metric, or one that cannot be
            used with its task.
    """
    sides = pair_of_models(reference, candidate, paths=paths, labels=labels)
    distinct_rules = list(dict.fromkeys(rules))
    tasks = list(dict.fromkeys(rule.task for rule in distinct_rules if rule.task != EVERYTHING))
    compared = {}
    for rule in distinct_rules:
        if rule.task == EVERYTHING:
            if rule.length or rule.up_to or rule.metric:
                raise UserError(f"A rule for task {EVERYTHING} cannot have a length, up_to or metric: name the task.")
            compared[rule] = compare_sides(sides, rule, other_groups=len(tasks))
    groups = len(tasks) + max((comparison.groups for comparison in compared.values()), default=0)
    confidence = 1 - (1 - CONFIDENCE) / groups
    by_rule = {rule: comparison.verdicts for rule, comparison in compared.items()}
    for task in tasks:
        rules_of_task = [rule for rule in distinct_rules if rule.task == task]
        by_rule |= grouped((judged.rule, judged) for judged in _judge_task(task, rules_of_task, sides, confidence))
    judged = [judged for rule in rules for judged in by_rule[rule]]
    return Gate(reference=sides[0].shown, candidate=sides[1].shown, judged=tuple(judged))


def _name(rule: "Rule") -> str:
    name = f"{rule.task} {rule.metric}" if rule.metric else rule.task
    if rule.tokens:
        return f"{name} at {length_text(rule.tokens)}"
    return f"{name}, {OVER_OCTAVES}" if rule.length else name


def _judge_task(task: str, rules: Sequence["Rule"], sides: tuple[Side, Side], confidence: float) -> list[Judged]:
    if any(text.task == task for side in sides for text in side.texts()):
        differences, obstacles = paired_differences(sides, task, confidence=confidence)
        pairs = [pair for rule in rules for pair in _by_length(rule, differences)]
        return [_judge_text(whole, of_length, differences, obstacles) for whole, of_length in pairs]
    if any(rule.up_to for rule in rules):
        raise UserError(f"A rule for {task} has up_to, which is only for tasks with NLL by length: use length.")
    sums = {} if task == RULER else _sums(rules, sides)
    differences, obstacles = paired_differences(sides, task, confidence=confidence, sums=list(sums.values()))
    numbers = dict(zip(sums, differences, strict=False))
    if task == RULER:
        by_length = {number.context_length_tokens: number for number in differences}
        numbers = {rule: by_length[rule.tokens] for rule in rules if rule.tokens in by_length}
    missing = " ".join(obstacles) or "not measured on the same samples by both"
    return [judge(rule, _name(rule), numbers.get(rule), "" if rule in numbers else missing) for rule in rules]


def _by_length(rule: "Rule", differences: Sequence[Difference]) -> list[tuple["Rule", "Rule"]]:
    """Returns the rule with each rule for one length that it stands for: itself, or one for each length up to `up_to`.

    The length `up_to` itself is always among them, so that a rule without data there does not pass.

    Raises:
        UserError: the rule has both `length` and `up_to`.
    """
    if rule.up_to is None:
        return [(rule, rule)]
    if rule.length is not None:
        raise UserError(f"The rule for {rule.task} has length and up_to, which exclude each other: remove one of them.")
    measured = {each.context_length_tokens for each in differences} - {None}
    lengths = sorted({rule.up_to, *(length for length in measured if length is not None and length < rule.up_to)})
    return [(rule, rule.model_copy(update={"length": length, "up_to": None})) for length in lengths]


def _judge_text(whole: "Rule", rule: "Rule", differences: Sequence[Difference], obstacles: Sequence[str]) -> Judged:
    """Judges one length; the result names `whole`, the rule of the policy that `rule` was made of."""
    if rule.metric not in (None, "nll", _BITS_METRIC):
        allowed = f"a rule for {rule.task} has no metric, or {_BITS_METRIC} where the tokenizers differ"
        raise UserError(f"{rule.metric} is no metric for {rule.task}: {allowed}.")
    here = [number for number in differences if rule.length and number.context_length_tokens == rule.tokens]
    unit = BITS if rule.metric == _BITS_METRIC else NATS
    if here and here[-1].unit == unit:
        return _judged(whole, rule, here[-1])
    if here:
        remedy = f"add metric: {_BITS_METRIC} to the rule" if unit == NATS else "leave out the metric of the rule"
        whose = OTHER_TOKENIZERS if unit == NATS else "the tokenizers are the same"
        return _judged(whole, rule, None, f"{whose}, and the unit is {here[-1].unit}: {remedy}", comparable=False)
    reason = " ".join(obstacles) or "not measured at this length by both models"
    return _judged(whole, rule, None, reason, comparable=OTHER_TOKENIZERS not in reason or bool(differences))


def _judged(
    whole: "Rule", rule: "Rule", number: Difference | None, reason: str = "", *, comparable: bool = True
) -> Judged:
    judged = judge(rule, _name(rule), number, reason, comparable=comparable)
    return judged if whole is rule else dataclasses.replace(judged, rule=whole)


def _sums(rules: Sequence["Rule"], sides: tuple[Side, Side]) -> dict["Rule", WeightedSum]:
    """Returns rule to the sum of metrics that it judges; rules with a metric that a model lacks are left out."""
    reference, candidate = (side.samples().get(rules[0].task) for side in sides)
    if reference is None or candidate is None:
        return {}
    both = [metric for metric in reference.scores if metric in candidate.scores]
    rows = sides[1].results.measurements
    sums = {}
    for rule in rules:
        name = _metric_name(rule, reference)
        ways = rows[(rows["task"] == rule.task) & (rows["metric"] == name)]["higher_is_better"].dropna()
        if weights := _summands(rule, name, both):
            sums[rule] = WeightedSum(weights, usual_direction(name) if ways.empty else bool(ways.iloc[0]))
    return sums


def _summands(rule: "Rule", name: str, both: Iterable[MetricKey]) -> dict[MetricKey, float]:
    """Returns metric to weight, for the weighted sum of metrics that a rule judges; empty if a model lacks a metric.

    Args:
        rule: the rule.
        name: name of the metric, without context length and filter.
        both: the metrics that both models have.
    """
    filter_name = (rule.metric or "").partition(",")[2]
    by_length: dict[int | None, MetricKey] = {}
    for metric, chosen in both:
        plain, length = context_metric(metric) or (metric, None)
        if plain == name and chosen == (filter_name or chosen):
            by_length.setdefault(length, (metric, chosen))
    if rule.length != MEAN:
        return {by_length[rule.tokens]: 1.0} if rule.tokens in by_length else {}
    lengths = sorted(length for length in by_length if length is not None)
    if len(lengths) < 2:
        return {}
    return {by_length[length]: float(weight) for length, weight in zip(lengths, octave_weights(lengths), strict=True)}


def _metric_name(rule: "Rule", scores: SampleScores) -> str:
    if rule.metric is not None:
        return rule.metric.partition(",")[0]
    names = list(dict.fromkeys((context_metric(metric) or (metric,))[0] for metric, _ in scores.scores))
    usual = [name for name in _USUAL_METRICS if name in names]
    if not usual and len(names) != 1:
        raise UserError(f"The rule for {rule.task} needs a metric: name one of {', '.join(names)}.")
    return (usual or names)[0]


def judge_command(
    pair: tuple[str, str],
    paths: list[Path],
    labels: dict[str, str],
    *,
    fail_if_worse: bool,
    least_effect: float | None,
    policy: Path | None,
) -> int:
    """Prints the comparison of two models, or the verdicts of a policy, for `sbeval report`.

    Args:
        pair: reference and candidate: folders, files, or names of models in `paths`.
        paths: folders and files with results, in which models are looked up by name.
        labels: name of a model or text to the name shown instead.
        fail_if_worse: whether the exit code is 1 if the candidate is worse.
        least_effect: largest change that does not count as worse, in the unit of the number; None for the value in the
            rule that comes with sbeval.
        policy: file of rules; None to compare all numbers.

    Returns:
        The exit code: 1 if a rule fails, or if the candidate is worse and `fail_if_worse` is set; 3 if no rule fails
        but for some rule there is not enough data or its numbers cannot be compared; else 0.

    Raises:
        UserError: options contradict each other, or `compare` or `gate` raises the error.
    """
    if policy is not None:
        if fail_if_worse or least_effect is not None:
            option = "--fail-if-worse" if fail_if_worse else "--least-effect"
            raise UserError(f"--gate and {option} exclude each other: the rules of the file say what counts as worse.")
        judged = gate(rules_of(policy), *pair, paths=paths, labels=labels)
        print(judged.text())
        return _EXIT_CODES[judged.verdict]
    if least_effect is not None and not 0 <= least_effect < math.inf:
        raise UserError(f"Expected --least-effect to be 0 or more, found {least_effect:g}: give a number such as 0.02.")
    comparison = compare(*pair, paths=paths, labels=labels, least_effect=least_effect)
    print(comparison.text())
    if fail_if_worse:
        failed = [judged.text for judged in comparison.verdicts if judged.verdict == "fail"]
        doubt = ", but bands are doubtful, see above" if comparison.doubtful else ""
        print("\n".join(["", *failed]) if failed else f"\nnothing is worse beyond what is allowed{doubt}")
    if fail_if_worse and not comparison.can_be_judged:
        raise UserError(
            "--fail-if-worse needs at least 20 documents or samples, and these results have fewer: evaluate more text."
        )
    return int(fail_if_worse and comparison.worse)
