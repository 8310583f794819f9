"""A policy over several tasks at once: which change of which number may a candidate show against a reference?

A rule names a task, a length and the largest change for the worse. It passes where the whole interval of the paired
difference is within that, it fails where the whole interval is beyond it, and elsewhere there is not enough data. The
intervals of all rules hold at once in 95 % of cases: those of one task by a simultaneous band, tasks by Bonferroni's
inequality. So the chance that any verdict of a file is wrong is at most 5 % (`research/interval_studies/gates.py`).
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from sbeval.errors import UserError
from sbeval.reports.analyse.compare_lengths import NATS, Measured, compare_documents
from sbeval.reports.analyse.one_number.areas import octave_weights
from sbeval.reports.analyse.paired import PairedDifference, metric_differences, ruler_differences
from sbeval.reports.analyse.statistics import CONFIDENCE
from sbeval.reports.analyse.suite import usual_direction
from sbeval.reports.compare import Side, measured, pair_of_models
from sbeval.reports.read.fields import context_metric, length_text
from sbeval.reports.read.samples import SAMPLE_SCORES, MetricKey, SampleScores
from sbeval.results.digits import with_interval
from sbeval.results.intervals import MINIMUM_CLUSTERS, UNEVEN_COVERAGE

MEAN, RULER = "mean", "ruler"
_FEW = f"intervals need {MINIMUM_CLUSTERS} documents or samples that both have"
_USUAL_METRICS = ("score", "exact_match")
Verdict = Literal["pass", "fail", "not enough data"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One rule of a policy.

    Attributes:
        task: a task as results name it; `RULER` for the mean over RULER's tasks.
        length: context length in tokens; `MEAN` for the mean over octaves, of NLL beyond the training length.
        largest_change: largest change for the worse, in nats per token or a score's own unit.
        metric: of a task that is scored by sample.
    """

    task: str
    largest_change: float
    length: int | str | None = None
    metric: str | None = None

    @property
    def tokens(self) -> int | None:
        """The context length, None for the mean and for a task without one."""
        return self.length if isinstance(self.length, int) else None

    @property
    def name(self) -> str:
        """What the rule is about, in a few words."""
        place = f" at {length_text(self.tokens)}" if self.tokens else ", mean over octaves" if self.length else ""
        return f"{self.task}{f' {self.metric}' if self.metric else ''}{place}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A rule with what the data say about it.

    Attributes:
        rule: the rule.
        change: how much worse the candidate is, above zero for worse; NaN where nothing is known.
        low: lower end of the interval that holds at once with those of all rules.
        high: its upper end.
        reason: why there is no interval, or what is doubtful about it; empty for neither.
    """

    rule: Rule
    change: float = math.nan
    low: float = math.nan
    high: float = math.nan
    reason: str = ""

    @property
    def verdict(self) -> Verdict:
        """Whether the change is certainly within what the rule allows, or certainly not."""
        if self.high <= self.rule.largest_change:
            return "pass"
        return "fail" if self.low > self.rule.largest_change else "not enough data"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Two models judged by a policy."""

    reference: str
    candidate: str
    judged: tuple[Judged, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of any rule, a failure before too little data."""
        found = [one.verdict for one in self.judged]
        return "fail" if "fail" in found else "not enough data" if "not enough data" in found else "pass"

    def text(self) -> str:
        """Returns the verdicts as lines for a terminal."""
        lines = [f"{self.candidate} against {self.reference}; above zero is worse; 95% intervals that hold at once"]
        for one in self.judged:
            change = "" if math.isnan(one.change) else f": {with_interval(one.change, one.low, one.high)}"
            lines.append(f"{one.verdict}: {one.rule.name}{change}, at most {one.rule.largest_change:+g} allowed")
            lines += [f"  {one.reason}"] if one.reason else []
        return "\n".join([*lines, f"all rules: {self.verdict}"])


def gate(
    rules: Sequence[Rule],
    reference: Path | str,
    candidate: Path | str,
    *,
    paths: Iterable[Path | str] = (),
    labels: Mapping[str, str] | None = None,
) -> Gate:
    """Judges a candidate by a policy; arguments but the first are those of `compare`.

    Args:
        rules: what is asked of the candidate.
        reference: what the candidate is compared with.
        candidate: the one to be judged.
        paths: results in which names are looked up.
        labels: names to show in place of the checkpoints' own.

    Raises:
        UserError: a name does not stand for one model, or a rule has to name its metric or must not.
    """
    sides = pair_of_models(reference, candidate, paths=paths, labels=labels)
    tasks = list(dict.fromkeys(rule.task for rule in rules))
    confidence = 1 - (1 - CONFIDENCE) / len(tasks)
    by_rule: dict[Rule, Judged] = {}
    for task in tasks:
        own = [rule for rule in dict.fromkeys(rules) if rule.task == task]
        by_rule |= {one.rule: one for one in _judge_task(task, own, sides, confidence)}
    return Gate(reference=sides[0].shown, candidate=sides[1].shown, judged=tuple(by_rule[rule] for rule in rules))


def _judge_task(task: str, rules: Sequence[Rule], sides: tuple[Side, Side], confidence: float) -> list[Judged]:
    texts = [[one for one in measured(side) if one.task == task] for side in sides]
    if any(texts):
        return _judge_text(rules, texts, confidence)
    logged = [
        {name: scores for (label, name), scores in side.results[SAMPLE_SCORES].items() if label == side.label}
        for side in sides
    ]
    if task == RULER:
        found, _ = ruler_differences(logged[1], logged[0], confidence=confidence)
        return [_scored(rule, found.get(rule.tokens), higher_is_better=True) for rule in rules]
    if any(task not in side for side in logged):
        return [Judged(rule=rule, reason="one of the two has no logged samples of this task") for rule in rules]
    return _judge_scores(rules, (logged[0][task], logged[1][task]), sides, confidence)


def _judge_text(rules: Sequence[Rule], texts: Sequence[Sequence[Measured]], confidence: float) -> list[Judged]:
    lengths, obstacles = compare_documents(*texts, confidence=confidence)
    found = {one.context_length_tokens: one for one in lengths}
    judged = []
    for rule in rules:
        one = found.get(rule.tokens) if rule.length is not None else None
        if rule.metric not in (None, "nll"):
            raise UserError(f"Expected no metric for {rule.task}, found {rule.metric}: its NLL is what is compared.")
        if one is None or one.unit != NATS:
            reason = " ".join(obstacles) or ("the tokenizers differ" if one else "not measured at this length by both")
            judged.append(Judged(rule=rule, reason=reason))
        else:
            doubt = f"doubtful: the documents differ much in size, so that 95% are {UNEVEN_COVERAGE}"
            reason = _FEW if math.isnan(one.low) else doubt if one.doubtful else ""
            judged.append(Judged(rule=rule, change=one.estimate, low=one.low, high=one.high, reason=reason))
    return judged


def _judge_scores(
    rules: Sequence[Rule], scores: tuple[SampleScores, SampleScores], sides: tuple[Side, Side], confidence: float
) -> list[Judged]:
    """Compares sums of metrics, one a rule, so that one band holds for all rules of the task."""
    summands = [_summands(rule, scores) for rule in rules]
    known = [place for place, own in enumerate(summands) if own]
    metrics = list(dict.fromkeys(metric for own in summands for metric in own))
    weights_MK = np.array([[summands[place].get(metric, 0.0) for place in known] for metric in metrics])
    found: dict[int, PairedDifference] = {}
    if known:
        differences = metric_differences(scores[1], scores[0], metrics, weights_MK=weights_MK, confidence=confidence)
        found = dict(zip(known, differences, strict=False))
    judged = []
    for place, rule in enumerate(rules):
        name = _metric_name(rule, scores)
        rows = sides[1].results.measurements
        ways = rows[(rows["task"] == rule.task) & (rows["metric"] == name)]["higher_is_better"].dropna()
        better = usual_direction(name) if ways.empty else bool(ways.iloc[0])
        judged.append(_scored(rule, found.get(place), higher_is_better=better))
    return judged


def _summands(rule: Rule, scores: tuple[SampleScores, SampleScores]) -> dict[MetricKey, float]:
    """Returns the metrics that make a rule's number, with their weights; empty where one of the two lacks them."""
    name, _, wanted = (rule.metric or _metric_name(rule, scores)).partition(",")
    both = [metric for metric in scores[0].scores if metric in scores[1].scores]
    own: dict[int | None, MetricKey] = {}
    for metric, chosen in both:
        plain, length = context_metric(metric) or (metric, None)
        if plain == name and chosen == (wanted or chosen):
            own.setdefault(length, (metric, chosen))
    if rule.length != MEAN:
        return {own[rule.tokens]: 1.0} if rule.tokens in own else {}
    lengths = sorted(length for length in own if length is not None)
    if len(lengths) < 2:
        return {}
    return {own[length]: float(weight) for length, weight in zip(lengths, octave_weights(lengths), strict=True)}


def _metric_name(rule: Rule, scores: tuple[SampleScores, SampleScores]) -> str:
    if rule.metric is not None:
        return rule.metric.partition(",")[0]
    names = list(dict.fromkeys((context_metric(metric) or (metric,))[0] for metric, _ in scores[0].scores))
    usual = [name for name in _USUAL_METRICS if name in names]
    if not usual and len(names) != 1:
        raise UserError(f"Expected a metric for {rule.task}, found none: name one of {', '.join(names)}.")
    return (usual or names)[0]


def _scored(rule: Rule, found: PairedDifference | None, *, higher_is_better: bool | None) -> Judged:
    if found is None or higher_is_better is None:
        absent = (
            "not measured on the same samples by both" if found is None else "it is not recorded which way is better"
        )
        return Judged(rule=rule, reason=absent)
    low, high = (-found.high, -found.low) if higher_is_better else (found.low, found.high)
    change = -found.estimate if higher_is_better else found.estimate
    return Judged(rule=rule, change=change, low=low, high=high, reason=_FEW if math.isnan(low) else "")
