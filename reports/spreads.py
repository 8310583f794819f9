"""Spreads of paired differences over documents or samples, from results files with samples, for planning a run.

A spread is the standard deviation of differences over documents: the standard error of the difference, as reports
compute it, times the square root of the number of documents. So a run of n documents has a standard error of the spread
divided by the square root of n.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from sbeval.planning.power import Spread
from sbeval.reports.analyse.paired import scores_by_length
from sbeval.reports.analyse.statistics import Floats, graded_errors
from sbeval.reports.build import load_results
from sbeval.reports.read.fields import context_metric
from sbeval.reports.read.files import Paths
from sbeval.reports.read.results import Results, records
from sbeval.reports.read.samples import DOCUMENT_SUMS, SAMPLE_SCORES, SampleScores, SumsByDocument
from sbeval.results.intervals import MINIMUM_CLUSTERS, RESAMPLES, resampled, uneven

NATS, SCORE = "nats per token", "score"
_LEAST_SKEWNESS_ERROR, _MOST_MOVE, _MOST_KURTOSIS = 0.05, 3.0, 0.75
SCORE_METRICS = ("score", "found", "accuracy", "exact_match")
"""Metrics of samples in order of preference; of each task the first that it has is planned."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pilot:
    """The spread of one paired difference in earlier results.

    Attributes:
        task: the task.
        unit: `NATS` or `SCORE`.
        models: the model, or the two models, the first minus the second.
        lengths: the context length, or two lengths, the first minus the second.
        spread: the spread over documents or samples, in the unit.
        units: number of documents or samples that it is computed from.
        doubtful: whether documents are so uneven in size that intervals are doubtful.
    """

    task: str
    unit: str
    models: tuple[str, ...]
    lengths: tuple[int, ...]
    spread: Spread
    units: int
    doubtful: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Earlier:
    """What earlier results say for a plan.

    Attributes:
        pilots: the spreads of the paired differences between neighbouring lengths of each model, and between the
            first model and each other one.
        tokens_per_second: input tokens per second of model time, of the newest run that recorded them; None for none.
        gpu: the GPU of that run, None for a CPU.
        left_out: sentences on results without spreads.
    """

    pilots: tuple[Pilot, ...]
    tokens_per_second: float | None
    gpu: str | None
    left_out: tuple[str, ...]


def earlier_spreads(paths: Paths, tasks: Sequence[str], lengths: Sequence[int] | None = None) -> Earlier:
    """Reads results files and returns the spreads of differences of these tasks.

    Args:
        paths: results files, or folders of them.
        tasks: names of tasks.
        lengths: context lengths to compare; None takes all.

    Raises:
        UserError: there are no results.
    """
    results = load_results(paths)
    pilots = [*_perplexity(results, tasks, lengths), *_scores(results, tasks, lengths)]
    known = {pilot.task for pilot in pilots}
    left_out = tuple(f"{task}: {_reason(results, task, lengths)}" for task in tasks if task not in known)
    runs = sorted((run for model in results.models for run in model.runs), key=lambda run: run.date, reverse=True)
    timed = next((run.record for run in runs if run.record.tokens_per_second), None)
    return Earlier(
        pilots=tuple(pilots),
        tokens_per_second=None if timed is None else timed.tokens_per_second,
        gpu=None if timed is None else timed.gpu,
        left_out=left_out,
    )


def _reason(results: Results, task: str, lengths: Sequence[int] | None) -> str:
    """Returns why a task has no spread in these results."""
    if task not in set(results.tasks):
        return "the earlier results do not contain it"
    logged = [scores for (_, name), scores in results[SAMPLE_SCORES].items() if name == task]
    has_documents = any(key[1] == task for key in results[DOCUMENT_SUMS])
    if not (logged or has_documents):
        return "the earlier results have no samples of it, which --log_samples writes"
    metrics = {metric for scores in logged for metric, _ in scores.scores}
    if not has_documents and not any(context_metric(metric) for metric in metrics):
        return "its scores in the earlier results have no context lengths"
    if not has_documents and not any(scores_by_length(scores, name) for scores in logged for name in SCORE_METRICS):
        return f"its samples in the earlier results have none of the scores {', '.join(SCORE_METRICS)}"
    which = "lengths" if lengths is None else "of these lengths"
    shared = f"no two {which} and no two models with {MINIMUM_CLUSTERS} documents or samples in common"
    return f"the earlier results have {shared}"


def spread_of(differences_C: Floats, weights_C: Floats, *, graded: bool) -> Spread:
    """Returns the spread of a difference of ratios over documents, with draws of what it may be.

    The draws are those of a studentised bootstrap over documents, of the logarithm of the spread and of the skewness.
    A few documents of a long tail decide both, and a small pilot often lacks them: its excess kurtosis is a fraction of
    the true one. So the standard errors are those of documents with `_more_kurtosis` times the excess kurtosis.
    `research/interval_studies/plan_power.py` counts how often the intervals hold the truth.

    Args:
        differences_C: float64 [C], for each document the difference of two sums, such as NLL in nats.
        weights_C: float64 [C], the divisor of both sums, such as tokens.
        graded: whether the differences are those of scores from 0 to 1; then two samples are added, as reports do.
    """
    clusters = len(differences_C)

    def statistic(counts_BC: Floats) -> Floats:
        return _moments(counts_BC, differences_C, weights_C)

    log_spread, error, skewness, skewness_error = map(float, statistic(np.ones((1, clusters)))[0])
    least = float(graded_errors(differences_C[:, None], weights_C)[0]) * clusters**0.5 if graded else 0.0
    spread = float(np.exp(log_spread))
    if not error > 0:  # all differences are equal, or equally far from their mean
        skewness = skewness if spread > 0 else 0.0
        draws_B2 = np.array([[max(spread, least), skewness]])
        return Spread(estimate=max(spread, least), skewness=skewness, draws_B2=draws_B2)
    kurtosis = 1 + 4 * clusters * error**2  # of documents of equal sizes with this standard error
    more = min(kurtosis, 3.0) + _more_kurtosis(clusters) * max(0.0, kurtosis - 3)
    more = max(kurtosis, min(more, _MOST_KURTOSIS * clusters))
    factor = ((more - 1) / (kurtosis - 1)) ** 0.5
    moments_B4 = resampled(statistic, clusters, resamples=RESAMPLES // 5, seed=0)
    moments_B4 = moments_B4[np.isfinite(moments_B4).all(axis=1) & (moments_B4[:, 1] > 0)]
    logs_B, errors_B, skews_B, skew_errors_B = moments_B4.T
    moves_B = _limited((logs_B - log_spread) / errors_B) * factor
    skew_moves_B = _limited((skews_B - skewness) / np.maximum(skew_errors_B, _LEAST_SKEWNESS_ERROR)) * factor
    spreads_B = np.exp(log_spread - moves_B * error)
    most = 2 * clusters**0.5
    drawn_skews_B = np.clip(skewness - skew_moves_B * skewness_error, -most, most)
    draws_B2 = np.stack([np.maximum(spreads_B, least), drawn_skews_B], axis=1)
    return Spread(estimate=max(spread, least), skewness=skewness, draws_B2=draws_B2)


def _limited(moves_B: Floats) -> Floats:
    """Returns studentised moves within `_MOST_MOVE`; a resample without the documents of a tail has far larger ones."""
    return np.clip(moves_B, -_MOST_MOVE, _MOST_MOVE)


def _more_kurtosis(clusters: int) -> float:
    """Returns by how much the excess kurtosis of a pilot is multiplied, 4 at 60 documents; fitted to simulated runs."""
    return 1.0 + 24.0 / math.sqrt(clusters)


def _moments(counts_BC: Floats, differences_C: Floats, weights_C: Floats) -> Floats:
    """Returns logarithm of the spread, skewness, and their standard errors by influence values, in each resample.

    Returns:
        Float64 [B, 4]: the logarithm, its standard error, the skewness, its standard error. Not finite for a resample
        whose differences are all equal.
    """
    clusters = len(weights_C)
    sizes_B1 = (counts_BC @ weights_C / clusters)[:, None]
    ratios_B1 = (counts_BC @ differences_C / clusters)[:, None] / sizes_B1
    with np.errstate(invalid="ignore", divide="ignore"):
        residuals_BC = differences_C - ratios_B1 * weights_C
        deviations_B1 = np.sqrt((counts_BC * residuals_BC**2).sum(1, keepdims=True) / clusters)
        z_BC = residuals_BC / deviations_B1
        w_BC = weights_C / sizes_B1
        weighted = counts_BC / clusters
        zw_B1, zzw_B1, skews_B1 = (
            (weighted * values).sum(1, keepdims=True) for values in (z_BC * w_BC, z_BC**2 * w_BC, z_BC**3)
        )
        log_influences_BC = (z_BC**2 - 1) / 2 - (w_BC - 1) - zw_B1 * z_BC
        skew_influences_BC = z_BC**3 - skews_B1 - 3 * zzw_B1 * z_BC
        skew_influences_BC -= 1.5 * skews_B1 * (z_BC**2 - 1 - 2 * zw_B1 * z_BC)
        logs_B1 = np.log(deviations_B1 * (clusters / (clusters - 1)) ** 0.5 / sizes_B1)
        errors_B1, skew_errors_B1 = (
            np.sqrt((weighted * influences_BC**2).sum(1, keepdims=True) / (clusters - 1))
            for influences_BC in (log_influences_BC, skew_influences_BC)
        )
    return np.concatenate([logs_B1, errors_B1, skews_B1, skew_errors_B1], axis=1)


def _perplexity(results: Results, tasks: Sequence[str], lengths: Sequence[int] | None) -> Iterator[Pilot]:
    order = {model.label: place for place, model in enumerate(results.models)}
    rows = results.measurements[results.measurements["task"].isin(tasks)]
    rows = rows.sort_values("setting", key=lambda labels: labels.map(order), kind="stable")
    by_text: dict[tuple[str, str], list[tuple[str, SumsByDocument]]] = {}
    for row in records(rows.drop_duplicates(["setting", "task", "corpus_sha256"])):
        sums = results.behind(DOCUMENT_SUMS, row)
        if sums is not None:
            by_text.setdefault((row["task"], str(row["corpus_sha256"])), []).append((row["setting"], sums))
    for (task, _), models in by_text.items():
        for label, sums in models:
            for shorter, longer in itertools.pairwise(_chosen(sums.lengths, lengths)):
                yield from _of_documents(task, (label,), (longer, shorter), (sums, longer), (sums, shorter))
        first, first_sums = models[0]
        for second, other in models[1:]:
            for length in _chosen(sorted({*first_sums.lengths} & {*other.lengths}), lengths):
                yield from _of_documents(task, (first, second), (length,), (first_sums, length), (other, length))


def _of_documents(
    task: str,
    models: tuple[str, ...],
    lengths: tuple[int, ...],
    minuend: tuple[SumsByDocument, int],
    subtrahend: tuple[SumsByDocument, int],
) -> Iterator[Pilot]:
    """Yields the spread of a difference of NLL, over the documents in which both have the same number of targets."""
    left, right = (sums.documents(length) for sums, length in (minuend, subtrahend))
    shared = sorted(name for name in left if name in right and left[name][1] == right[name][1])
    if len(shared) < MINIMUM_CLUSTERS:
        return
    nats = np.array([left[name][0] - right[name][0] for name in shared])
    tokens = np.array([left[name][1] for name in shared])
    spread = spread_of(nats, tokens, graded=False)
    names = {"task": task, "unit": NATS, "models": models, "lengths": lengths}
    yield Pilot(spread=spread, units=len(shared), doubtful=uneven(tokens), **names)  # type: ignore[arg-type]


def _scores(results: Results, tasks: Sequence[str], lengths: Sequence[int] | None) -> Iterator[Pilot]:
    by_task: dict[str, list[tuple[str, SampleScores]]] = {}
    logged = results[SAMPLE_SCORES]
    for label, task in ((model.label, task) for model in results.models for task in tasks):
        if (label, task) in logged:
            by_task.setdefault(task, []).append((label, logged[label, task]))
    for task, models in by_task.items():
        metric = next((name for name in SCORE_METRICS if any(scores_by_length(s, name) for _, s in models)), None)
        if metric is None:
            continue
        tables = [(label, scores_by_length(scores, metric)) for label, scores in models]
        for label, table in tables:
            for shorter, longer in itertools.pairwise(_chosen(sorted(table), lengths)):
                yield from _of_samples(task, (label,), (longer, shorter), table[longer], table[shorter])
        first, first_table = tables[0]
        for second, other in tables[1:]:
            for length in _chosen(sorted(first_table.keys() & other.keys()), lengths):
                yield from _of_samples(task, (first, second), (length,), first_table[length], other[length])


def _of_samples(
    task: str, models: tuple[str, ...], lengths: tuple[int, ...], minuend: object, subtrahend: object
) -> Iterator[Pilot]:
    left, right = dict(minuend), dict(subtrahend)  # type: ignore[call-overload]
    shared = sorted(left.keys() & right.keys())
    if len(shared) < MINIMUM_CLUSTERS:
        return
    differences = np.array([left[key] - right[key] for key in shared])
    graded = bool((np.abs(differences) <= 1).all())
    spread = spread_of(differences, np.ones(len(shared)), graded=graded)
    names = {"task": task, "unit": SCORE, "models": models, "lengths": lengths}
    yield Pilot(spread=spread, units=len(shared), **names)  # type: ignore[arg-type]


def _chosen(known: Iterable[int], lengths: Sequence[int] | None) -> list[int]:
    return [length for length in known if lengths is None or length in lengths]
