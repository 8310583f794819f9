"""Differences between two models on the same samples: ordinary tasks and RULER."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

import sbeval.reports.analyse.statistics as stats
from sbeval.reports.analyse.ruler import TASKS, short_name
from sbeval.reports.analyse.statistics import CONFIDENCE, Estimate, Floats
from sbeval.reports.read.fields import context_metric
from sbeval.reports.read.samples import MetricKey, SampleKey, SampleScores

# scores such as the share of five answers found differ by few values; a log-likelihood differs by as many as samples
_MOST_GRADES = 21
Metrics = Sequence[MetricKey]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference(Estimate):
    """One model minus another on the samples both have; the ends of the 95% interval are NaN below 20 samples."""

    samples: int


def task_difference(
    own: SampleScores, base: SampleScores, metric: MetricKey, *, confidence: float = CONFIDENCE
) -> PairedDifference | None:
    """Compares one metric of an ordinary task; None where the two share no sample."""
    return next(iter(metric_differences(own, base, [metric], confidence=confidence)), None)


def metric_differences(
    own: SampleScores,
    base: SampleScores,
    metrics: Sequence[MetricKey],
    *,
    confidence: float,
    weights_MK: Floats | None = None,
) -> list[PairedDifference]:
    """Compares metrics of one task on the samples that have all of them, with one band over the differences.

    `weights_MK` make sums of metrics, such as the mean over octaves, that are compared in place of the metrics.

    Returns:
        One difference a metric or sum; empty where the two share no sample.
    """
    if not all(metric in side.scores for side in (own, base) for metric in metrics):
        return []
    sides = [[side.scores[metric] for metric in metrics] for side in (own, base)]
    keys = [key for key in sides[0][0] if all(key in scores for side in sides for scores in side)]
    if not keys:
        return []
    mine, theirs = (np.array([[scores[key] for scores in side] for key in keys]) for side in sides)
    differences = mine - theirs if weights_MK is None else (mine - theirs) @ weights_MK
    return _differences(differences, np.ones(len(keys)), confidence)


def ruler_differences(
    own: Mapping[str, SampleScores], base: Mapping[str, SampleScores], *, confidence: float = CONFIDENCE
) -> tuple[dict[int | None, PairedDifference], tuple[str, ...]]:
    """Compares RULER's average over the tasks two models share, with a band simultaneous over the lengths.

    Every task weighs the same, whatever its number of samples. Lengths count where every shared task has them. Samples
    of all tasks are resampled together, so the spread between tasks widens the band: it errs on the wide side.

    Returns:
        Context length to difference, with the mean over octaves under None, and the tasks compared.
    """
    tasks = [task for task in own if short_name(task) in TASKS and task in base]
    lengths = [set(scores_by_length(own[task])) & set(scores_by_length(base[task])) for task in tasks]
    shared = sorted(set.intersection(*lengths)) if lengths else []
    rows = []
    weights = []
    compared = []
    for task in tasks:
        mine, theirs = scores_by_length(own[task]), scores_by_length(base[task])
        tables = [side[length] for side in (mine, theirs) for length in shared]
        keys = [key for key in tables[0] if all(key in table for table in tables)] if tables else []
        if keys:
            rows.append(np.array([[mine[length][key] - theirs[length][key] for length in shared] for key in keys]))
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
    """Returns context length to the scores of the samples, of one metric."""
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
