"""Sums up a curve over context lengths as one number: the mean over octaves, or the effective length by NLL.

The mean over octaves is the area under the curve over log2 of the context length, divided by the width of the range of
lengths. For NLL it is the mean change beyond the training length, on identical targets: for each document, the mean NLL
from the training length to the longest length, minus NLL at the training length. NLL at the training length is
subtracted because a model that is worse by the same amount at every length has not failed beyond its training length.
For scores it is the mean score from the shortest to the longest length.

Both are weighted means over lengths. The weighted mean is computed for each document before documents are resampled, so
its confidence interval is computed like that of NLL at one length. It can also be included in a simultaneous confidence
band over the single lengths; the band becomes hardly wider.

The effective length by NLL is `LengthClaims.lowers_to_tokens`, which the summary shows too. It depends on steps: the
NLL at each length minus the NLL at the next shorter length. The true effective length is the last length whose true
step lowers NLL, before any true step that raises NLL. The simultaneous intervals cover all true steps at once in 95 %
of cases. The interval of the effective length follows from them: a step whose interval includes zero may truly raise or
lower NLL. The lower end is the effective length if all such steps raise NLL; the upper end, if all such steps lower it.

Shape suffixes: K lengths, C documents or samples.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from sbeval.reports.analyse.claims import Claims, LengthClaims
from sbeval.reports.analyse.left_out import on_other_samples
from sbeval.reports.analyse.paired import scores_by_length
from sbeval.reports.analyse.ruler import TASKS, RulerScores, by_length, short_name
from sbeval.reports.analyse.statistics import (
    Estimate,
    Floats,
    change_weights,
    mean_interval,
    octave_weights,
    score_interval,
)
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.results import Results, records
from sbeval.reports.read.samples import DOCUMENT_SUMS, SAMPLE_SCORES, SampleKey, SumsByDocument
from sbeval.results.intervals import ratio_interval, uneven
from sbeval.results.records import IDENTICAL_TARGETS

NLL_CHANGE = "nll_change"
SCORE = "score"
EFFECTIVE = "effective_nll_length"
ScoresByLength = Mapping[int, Mapping[SampleKey, float]]
COLUMNS = [
    "setting",
    "task",
    "metric",
    "unit",
    "from_tokens",
    "to_tokens",
    "value",
    "ci95_low",
    "ci95_high",
    "units",
    "doubtful",
]
_RECALL_METRIC = "exact_match"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Area(Estimate):
    """A mean over octaves of context length: a change of NLL in nats per token, or a score.

    Attributes:
        from_tokens: shortest length of the mean; for NLL this is the reference length, whose NLL is subtracted.
        to_tokens: longest length of the mean.
        units: number of documents or samples that the mean is computed from; None if samples were not logged.
        doubtful: whether documents are so uneven in size that the interval covers the true value in fewer cases than it
            claims.
    """

    from_tokens: int
    to_tokens: int
    units: int | None
    doubtful: bool = False


def nll_area(sums: SumsByDocument, reference_tokens: int | None) -> Area | None:
    """Returns the mean change of NLL beyond a reference length, in nats per token, on documents with identical targets.

    Args:
        sums: sums of NLL by document and length.
        reference_tokens: the training length, or the longest length below it that was evaluated; None if it is unknown.

    Returns:
        The mean with its interval; None if no length is beyond the reference length, or if no document has the same
        targets at all lengths.
    """
    weights_K = change_weights(sums.lengths, reference_tokens)
    same_C = (sums.tokens == sums.tokens[:, :1]).all(axis=1) & (sums.tokens[:, 0] > 0)
    if weights_K is None or reference_tokens is None or not same_C.any():
        return None
    tokens_C = sums.tokens[same_C, 0]
    change = ratio_interval(sums.nll_nats[same_C] @ weights_K, tokens_C, seed=0)
    return Area(
        from_tokens=reference_tokens,
        to_tokens=sums.lengths[-1],
        estimate=change.estimate,
        low=math.nan if change.low is None else change.low,
        high=math.nan if change.high is None else change.high,
        units=change.clusters,
        doubtful=uneven(tokens_C),
    )


def score_area(means: Mapping[int, float], samples: Sequence[ScoresByLength] = ()) -> Area | None:
    """Returns the mean score over octaves of context length; each task has the same weight.

    Args:
        means: context length to the mean score over all tasks.
        samples: for each task, context length to (sample to its score). The interval is computed from samples that have
            a score at every length of `means`; it is NaN if some task has fewer than two such samples.

    Returns:
        The mean with its interval; None for fewer than two lengths.
    """
    lengths = sorted(means)
    if len(lengths) < 2:
        return None
    weights_K = octave_weights(lengths)
    estimate = float(weights_K @ [means[length] for length in lengths])
    tasks = [_task_area(scores, lengths, weights_K) for scores in samples]
    known = [task for task in tasks if task is not None]
    low = math.nan
    high = math.nan
    count = 0
    # only if the logged samples have the mean of the results file: else some were not logged, and there is no interval
    if len(known) == len(tasks) > 0 and abs(estimate - np.mean([task[0] for task in known])) < 1e-6:
        low, high = mean_interval(*zip(*(task[:3] for task in known), strict=True))
        count = sum(task[3] for task in known)
    ends = (lengths[0], lengths[-1])
    return Area(from_tokens=ends[0], to_tokens=ends[1], estimate=estimate, low=low, high=high, units=count or None)


def _task_area(
    scores: ScoresByLength, lengths: Sequence[int], weights_K: Floats
) -> tuple[float, float, float, int] | None:
    """Returns (mean over octaves, lower end, upper end of its interval, number of samples) of one task.

    Only samples with a score at every length count. None if there are fewer than two.
    """
    shared = set.intersection(*(set(scores.get(length, {})) for length in lengths))
    if len(shared) < 2:
        return None
    areas_C = np.array([[scores[length][key] for length in lengths] for key in sorted(shared)]) @ weights_K
    mean = float(areas_C.mean())
    count = len(areas_C)
    low, high = score_interval(mean, areas_C.std(ddof=1) / count**0.5, count)
    return mean, float(low), float(high), count


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EffectiveNllLength:
    """The length up to which more context lowers NLL, in tokens, with its 95% interval.

    Attributes:
        tokens: the last length at which NLL is measurably lower than at the next shorter length, before any length at
            which it is measurably higher; None if there is no such length.
        low: lower end of the interval; None if it is not certain that more context lowers NLL at any length.
        high: upper end of the interval; None if NLL rises measurably already from the shortest length to the next.
        longest: the longest length compared. It is shown as "≥", since nothing is known about longer ones.
    """

    tokens: int | None
    low: int | None
    high: int | None
    longest: int

    @property
    def shown(self) -> str:
        """The length as text, without its interval."""
        return self._shown(self.tokens)

    @property
    def shown_interval(self) -> tuple[str, str]:
        """The lower and upper end of the effective length's interval, as texts."""
        return self._shown(self.low), self._shown(self.high)

    @property
    def text(self) -> str:
        """The length with its interval, such as "16K [4K, ≥ 64K]"."""
        return f"{self.shown} [{', '.join(self.shown_interval)}]"

    def _shown(self, tokens: int | None) -> str:
        if tokens is None:
            return "none"
        return ("≥ " if tokens == self.longest else "") + length_text(tokens)


def effective_nll_length(claim: LengthClaims, *, least_loss: float = 0.0) -> EffectiveNllLength | None:
    """Returns the effective length by NLL with its interval; None if the lengths could not be compared.

    Args:
        claim: the paired differences of NLL between lengths.
        least_loss: in nats per token. For the interval, NLL counts as risen at a length only if the whole interval of
            its difference to the next shorter length is above this value.
    """
    if claim.obstacle or not claim.steps:
        return None
    gains = [step.high < 0 for step in claim.steps]
    losses = [step.low > least_loss for step in claim.steps]
    sure = gains.index(False) if False in gains else len(gains)
    open_to = losses.index(True) if True in losses else len(losses)
    low, high = (claim.lengths[steps] if steps else None for steps in (sure, open_to))
    return EffectiveNllLength(tokens=claim.lowers_to_tokens, low=low, high=high, longest=max(claim.lengths))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CurveNumber:
    """The mean over octaves, and for NLL the effective length too, of one curve of one model.

    Attributes:
        setting: label of the model.
        task: the task, or "RULER, mean of N tasks".
        metric: `NLL_CHANGE` or `SCORE`.
        area: the mean over octaves.
        text: name of the text and of the perplexity protocol, if the metric is `NLL_CHANGE`.
        effective: the effective length by NLL, if the metric is `NLL_CHANGE`; None if lengths could not be compared.
    """

    setting: str
    task: str
    metric: str
    area: Area
    text: tuple[str, str] = ("", "")
    effective: EffectiveNllLength | None = None


def curve_numbers(results: Results, claims: Claims, ruler: RulerScores) -> tuple[CurveNumber, ...]:
    """Returns the numbers for all curves of all models: NLL on identical targets first, then RULER, then recall.

    Curves whose lengths have different samples, since some were left out, have none.
    """
    order = {model.label: place for place, model in enumerate(results.models)}
    kinds = (_perplexity(results, claims), _ruler(results, ruler), _recall(results))
    return tuple(number for kind in kinds for number in sorted(kind, key=lambda number: order[number.setting]))


def _perplexity(results: Results, claims: Claims) -> Iterator[CurveNumber]:
    rows = results.measurements[results.measurements["protocol"].isin(IDENTICAL_TARGETS)]
    for row in records(rows.drop_duplicates(["setting", "task", "corpus", "corpus_sha256"])):
        label = row["setting"]
        task = row["task"]
        text = (row["corpus"], row["protocol"])
        sums = results.behind(DOCUMENT_SUMS, row)
        claim = claims.get((label, *text))
        area = nll_area(sums, claim.reference_tokens) if sums is not None and claim is not None else None
        if area is not None and claim is not None:
            effective = effective_nll_length(claim)
            yield CurveNumber(setting=label, task=task, metric=NLL_CHANGE, area=area, text=text, effective=effective)


def _ruler(results: Results, ruler: RulerScores) -> Iterator[CurveNumber]:
    for label in dict.fromkeys(ruler.overall["setting"]):
        rows = ruler.scores[(ruler.scores["setting"] == label) & ruler.scores["ruler_task"].isin(TASKS)]
        if on_other_samples(rows):
            continue
        logged = {short_name(task): results[SAMPLE_SCORES].get((label, task)) for task in dict.fromkeys(rows["task"])}
        samples = [scores_by_length(scores, SCORE) for scores in logged.values() if scores is not None]
        area = score_area(by_length(ruler.overall, label), samples if len(samples) == len(logged) else ())
        if area is not None:
            name = f"RULER, mean of {len(logged)} {'task' if len(logged) == 1 else 'tasks'}"
            yield CurveNumber(setting=label, task=name, metric=SCORE, area=area)


def _recall(results: Results) -> Iterator[CurveNumber]:
    table = results.measurements
    rows = table[(table["family"] == "recall") & (table["metric"] == _RECALL_METRIC)]
    rows = rows.dropna(subset=["context_length_tokens"])
    for label, task in dict.fromkeys(rows[["setting", "task"]].itertuples(index=False, name=None)):
        if on_other_samples(rows[(rows["setting"] == label) & (rows["task"] == task)]):
            continue
        logged = results[SAMPLE_SCORES].get((label, task))
        samples = [scores_by_length(logged, _RECALL_METRIC)] if logged is not None else []
        area = score_area(by_length(rows[rows["task"] == task], label), samples)
        if area is not None:
            yield CurveNumber(setting=label, task=f"{task}, exact answers", metric=SCORE, area=area)


def tabulate_numbers(numbers: tuple[CurveNumber, ...]) -> pd.DataFrame:
    """Returns a table with columns `COLUMNS`: one row for each mean over octaves and for each effective length.

    A missing effective length is NaN.
    """
    rows: list[tuple[object, ...]] = []
    for number in numbers:
        area, effective = number.area, number.effective
        unit = "nats per token" if number.metric == NLL_CHANGE else "score"
        values: list[tuple[object, ...]] = [(number.metric, unit, area.estimate, area.low, area.high)]
        if effective is not None:
            values.append((EFFECTIVE, "tokens", effective.tokens, effective.low, effective.high))
        for metric, its_unit, *estimates in values:
            kind = (number.setting, number.task, metric, its_unit, area.from_tokens, area.to_tokens)
            rows.append((*kind, *estimates, area.units, area.doubtful))
    kinds = dict.fromkeys(["value", "ci95_low", "ci95_high"], "float64") | {"units": "Int64"}
    return pd.DataFrame(rows, columns=COLUMNS).astype(kinds)
