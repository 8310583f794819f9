"""Scores of single samples, by which two models are compared on the same questions; streamed from the samples files."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from sbeval.reports.read.fields import context_metric, shown_name, usable_number
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.notes import Notes
from sbeval.reports.read.runs import InputLimit, input_limit
from sbeval.reports.read.samples import read_lines

SampleKey = tuple[str, str]
"""A sample's number and what tells its question: equal in two runs where the question is the same."""
MetricKey = tuple[str, str]
"""A metric as the samples file names it (`acc`, `score@0004096`), and the filter before it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleScores:
    """What one model scored in one task.

    Attributes:
        scores: metric and filter to (sample to score).
        depths_percent: context length in tokens to (sample to the mean depth of its needles).
        by_limit: what bounded a run's inputs to that run's scores; `scores` holds the first of them.
    """

    scores: Mapping[MetricKey, Mapping[SampleKey, float]]
    depths_percent: Mapping[int, Mapping[SampleKey, float]] = dataclasses.field(default_factory=dict)
    by_limit: Mapping[InputLimit, Mapping[MetricKey, Mapping[SampleKey, float]]] = dataclasses.field(
        default_factory=dict
    )

    def within(self, limit: InputLimit) -> "SampleScores":
        """Returns the scores of the runs whose inputs had this bound."""
        return dataclasses.replace(self, scores=self.by_limit.get(limit, {}))


def read_all_scores(models: Sequence[EvaluatedModel], notes: Notes) -> dict[tuple[str, str], SampleScores]:
    """Returns (model label, task) to the scores of its samples, for all tasks but perplexity and spans.

    Of several runs of one model the first of `EvaluatedModel.task_runs` with a metric counts.
    """
    found: dict[tuple[str, str], list[SampleScores]] = defaultdict(list)
    for model in models:
        for run, task in model.task_runs():
            family = task.record.family if task.record else None
            if task.samples is not None and family not in ("perplexity", "span"):
                scores = read_scores(task.samples, notes)
                scores = dataclasses.replace(scores, by_limit={input_limit(run, task): scores.scores})
                found[model.label, shown_name(task.name)].append(scores)
    return {key: _first(parts) for key, parts in found.items()}


def read_scores(path: Path, notes: Notes) -> SampleScores:
    """Reads one samples file."""
    scores: dict[MetricKey, dict[SampleKey, float]] = defaultdict(dict)
    depths: dict[int, dict[SampleKey, float]] = defaultdict(dict)
    for sample in read_lines(path, notes):
        key = (str(sample.get("doc_id")), _question(sample))
        chosen = sample.get("filter")
        named = sample.get("metrics")
        if isinstance(named, list):
            metrics = {name for name in named if isinstance(name, str)}
        else:
            metrics = {name for name in sample if context_metric(name)}
        for metric in metrics:
            score = usable_number(sample.get(metric))
            if score is not None:
                scores[metric, str(chosen or "none")][key] = score
        for length, depth in _depths(sample.get("doc")).items():
            depths[length][key] = depth
    return SampleScores(scores=dict(scores), depths_percent=dict(depths))


def averaged(parts: Sequence[SampleScores]) -> SampleScores:
    """Averages models over the samples all of them have."""
    limits = [limit for limit in parts[0].by_limit if all(limit in part.by_limit for part in parts)]
    return SampleScores(
        scores=_means([part.scores for part in parts]),
        depths_percent=parts[0].depths_percent,
        by_limit={limit: _means([part.by_limit[limit] for part in parts]) for limit in limits},
    )


def _means(
    parts: Sequence[Mapping[MetricKey, Mapping[SampleKey, float]]],
) -> dict[MetricKey, dict[SampleKey, float]]:
    shared: dict[MetricKey, dict[SampleKey, float]] = {}
    for metric, first in parts[0].items():
        others = [part.get(metric, {}) for part in parts[1:]]
        keys = [key for key in first if all(key in other for other in others)]
        shared[metric] = {key: (first[key] + sum(other[key] for other in others)) / len(parts) for key in keys}
    return shared


def _first(parts: Sequence[SampleScores]) -> SampleScores:
    scores: dict[MetricKey, Mapping[SampleKey, float]] = {}
    depths: dict[int, Mapping[SampleKey, float]] = {}
    by_limit: dict[InputLimit, dict[MetricKey, Mapping[SampleKey, float]]] = defaultdict(dict)
    for part in reversed(parts):
        scores |= part.scores
        depths |= part.depths_percent
        for limit, found in part.by_limit.items():
            by_limit[limit] |= found
    return SampleScores(scores=scores, depths_percent=depths, by_limit=dict(by_limit))


def _question(sample: Mapping[str, object]) -> str:
    """The expected answers, where the prompt around them depends on the tokenizer; else the document's hash."""
    document = sample.get("doc")
    if isinstance(document, Mapping) and "references" in document:
        return str(document["references"])
    return str(sample.get("doc_hash", ""))


def _depths(document: object) -> dict[int, float]:
    if not isinstance(document, Mapping):
        return {}
    lengths, percents = document.get("lengths"), document.get("depths_percent")
    if not isinstance(lengths, list) or not isinstance(percents, list):
        return {}
    depths: dict[int, float] = {}
    for length, needles in zip(lengths, percents, strict=False):
        if isinstance(length, int) and isinstance(needles, list) and needles:
            numbers = [number for needle in needles if (number := usable_number(needle)) is not None]
            if len(numbers) == len(needles):
                depths[length] = sum(numbers) / len(numbers)
    return depths
