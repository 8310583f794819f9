"""Paired differences between two models on the same samples, for ordinary tasks and RULER."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

import sbeval.reports.analyse.statistics as stats
from sbeval.reports.analyse.ruler import TASKS, short_name
from sbeval.reports.analyse.statistics import CONFIDENCE, Estimate, Floats
from sbeval.reports.read.fields import context_metric
from sbeval.reports.read.samples import MetricKey, SampleKey, SampleScores

# scores such as the share of five answers found have few distinct differences; log-likelihoods have more than this
_MOST_GRADES = 21
Metrics = Sequence[MetricKey]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference(Estimate):
    """One model's score minus another model's, on the samples that both have.

    With fewer than 20 samples there is no interval: its ends are NaN.
    """

    samples: int


def task_difference(
    candidate: SampleScores, base: SampleScores, metric: MetricKey, *, confidence: float = CONFIDENCE
) -> PairedDifference | None:
    """Returns the candidate model's score minus the base model's in one metric; None if they share no sample."""
    return next(iter(metric_differences(candidate, base, [metric], confidence=confidence)), None)


def metric_differences(
    candidate: SampleScores,
    base: SampleScores,
    metrics: Sequence[MetricKey],
    *,
    confidence: float,
    weights_MK: Floats | None = None,
) -> list[PairedDifference]:
    """Compares two models in metrics of one task, on samples that have all metrics, with simultaneous intervals.

    Args:
        candidate: scores of the model from whose scores the base's are subtracted.
        base: scores of the model whose scores are subtracted.
        metrics: the M metrics to compare.
        confidence: probability that the intervals cover all true differences at once.
        weights_MK: float64 [M, K]; if given, K weighted sums of metrics, such as the mean over octaves of context
            length, are compared instead of the metrics.

    Returns:
        One difference for each metric or weighted sum; empty if the two models share no sample.
    """
    if not all(metric in side.scores for side in (candidate, base) for metric in metrics):
        return []
    sides = [[side.scores[metric] for metric in metrics] for side in (candidate, base)]
    keys = [key for key in sides[0][0] if all(key in scores for side in sides for scores in side)]
    if not keys:
        return []
    candidate_CM, base_CM = (np.array([[scores[key] for scores in side] for key in keys]) for side in sides)
    differences_CK = candidate_CM - base_CM
    if weights_MK is not None:
        differences_CK = differences_CK @ weights_MK
    return _differences(differences_CK, np.ones(len(keys)), confidence)


def ruler_differences(
    candidate: Mapping[str, SampleScores], base: Mapping[str, SampleScores], *, confidence: float = CONFIDENCE
) -> tuple[dict[int | None, PairedDifference], tuple[str, ...]]:
    """Compares two models in RULER's average over the tasks that both ran, with intervals simultaneous over lengths.

    Every task has the same weight, whatever its number of samples. Only lengths that every shared task has are
    compared. Samples of all tasks are resampled together, so the variance between tasks makes intervals wider than
    necessary.

    Args:
        candidate: task to its scores, of the model from whose scores the base's are subtracted.
        base: task to its scores, of the model whose scores are subtracted.
        confidence: probability that the intervals cover all true differences at once.

    Returns:
        Context length to difference (the key None has the difference of means over octaves of length), and the tasks
        compared.
    """
    tasks = [task for task in candidate if short_name(task) in TASKS and task in base]
    lengths = [set(scores_by_length(candidate[task])) & set(scores_by_length(base[task])) for task in tasks]
    shared = sorted(set.intersection(*lengths)) if lengths else []
    rows = []
    weights = []
    compared = []
    for task in tasks:
        scores, base_scores = scores_by_length(candidate[task]), scores_by_length(base[task])
        tables = [side[length] for side in (scores, base_scores) for length in shared]
        keys = [key for key in tables[0] if all(key in table for table in tables)] if tables else []
        if keys:
            rows.append(
                np.array([[scores[length][key] - base_scores[length][key] for length in shared] for key in keys])
            )
            weights.append(np.full(len(keys), 1 / len(keys)))
            compared.append(task)
    if not rows:
        return {}, ()
    weight = np.concatenate(weights)
    differences_CK = np.concatenate(rows)
    named = list[int | None](shared)
    if len(shared) > 1:
        differences_CK = np.column_stack([differences_CK, differences_CK @ stats.octave_weights(shared)])
        named.append(None)
    return dict(zip(named, _differences(differences_CK, weight, confidence), strict=True)), tuple(compared)


def scores_by_length(scores: SampleScores, wanted: str = "score") -> dict[int, Mapping[SampleKey, float]]:
    """Returns context length to (sample to its score) for the metric `wanted`."""
    parsed = ((context_metric(metric), values) for (metric, _), values in scores.scores.items())
    return {place[1]: values for place, values in parsed if place is not None and place[0] == wanted}


def _differences(differences_CK: Floats, weights_C: Floats, confidence: float) -> list[PairedDifference]:
    graded = bool((np.abs(differences_CK) <= 1).all()) and len(np.unique(differences_CK)) <= _MOST_GRADES
    band = stats.simultaneous_band(
        differences_CK * weights_C[:, None],
        weights_C,
        confidence=confidence,
        least_errors_K=stats.graded_errors(differences_CK, weights_C) if graded else None,
    )
    ends = [np.clip(end, -1, 1) if graded else end for end in (band.lows, band.highs)]
    return [
        PairedDifference(estimate=float(estimate), low=float(low), high=float(high), samples=len(weights_C))
        for estimate, low, high in zip(band.estimates, *ends, strict=True)
    ]
