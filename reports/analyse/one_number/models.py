"""One number of every model for each curve it has: perplexity on identical targets, RULER's mean, recall tasks."""

import dataclasses
from collections.abc import Mapping

import pandas as pd

from sbeval.reports.analyse.claims import ClaimKey, LengthClaims
from sbeval.reports.analyse.one_number.areas import Area, nll_area, score_area
from sbeval.reports.analyse.one_number.effective import EffectiveNllLength, effective_nll_length
from sbeval.reports.analyse.paired import scores_by_length
from sbeval.reports.analyse.ruler import TASKS, RulerScores, by_length, short_name
from sbeval.reports.read.results import Results
from sbeval.reports.read.samples import DOCUMENT_SUMS, SAMPLE_SCORES

NLL_CHANGE, SCORE, EFFECTIVE = "nll_change", "score", "effective_nll_length"
COLUMNS = [
    *("setting", "task", "metric", "unit", "from_tokens", "to_tokens", "value", "ci95_low", "ci95_high"),
    *("units", "doubtful"),
]
_RECALL_METRIC = "exact_match"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CurveNumber:
    """One number for one curve of one model.

    Attributes:
        setting: the model's label.
        task: the task, or "RULER, mean of N tasks".
        metric: `NLL_CHANGE` or `SCORE`.
        area: the mean over octaves.
        corpus: of `NLL_CHANGE`, name of the text.
        effective: of `NLL_CHANGE`, how far more context lowers NLL; None where nothing is claimed.
    """

    setting: str
    task: str
    metric: str
    area: Area
    corpus: str = ""
    effective: EffectiveNllLength | None = None


def curve_numbers(
    results: Results, claims: Mapping[ClaimKey, LengthClaims], ruler: RulerScores
) -> tuple[CurveNumber, ...]:
    """Returns the numbers of all models: perplexity under `fixed_target` first, then RULER, then recall tasks."""
    order = {model.label: place for place, model in enumerate(results.models)}
    kinds = (_perplexity(results, claims), _ruler(results, ruler), _recall(results))
    return tuple(one for kind in kinds for one in sorted(kind, key=lambda number: order[number.setting]))


def _perplexity(results: Results, claims: Mapping[ClaimKey, LengthClaims]) -> list[CurveNumber]:
    rows = results.measurements[results.measurements["protocol"] == "fixed_target"]
    found = []
    for label, task, corpus in dict.fromkeys(rows[["setting", "task", "corpus"]].itertuples(index=False, name=None)):
        sums, claim = results[DOCUMENT_SUMS].get((label, task)), claims.get((label, corpus, "fixed_target"))
        area = nll_area(sums, claim.reference_tokens) if sums is not None and claim is not None else None
        if area is not None and claim is not None:
            effective = effective_nll_length(claim)
            found.append(
                CurveNumber(setting=label, task=task, metric=NLL_CHANGE, area=area, corpus=corpus, effective=effective)
            )
    return found


def _ruler(results: Results, ruler: RulerScores) -> list[CurveNumber]:
    found = []
    for label in dict.fromkeys(ruler.overall["setting"]):
        own = ruler.scores[(ruler.scores["setting"] == label) & ruler.scores["ruler_task"].isin(TASKS)]
        tasks = list(dict.fromkeys(own["task"]))
        logged = {short_name(task): results[SAMPLE_SCORES].get((label, task)) for task in tasks}
        samples = [scores_by_length(scores, SCORE) for scores in logged.values() if scores is not None]
        area = score_area(by_length(ruler.overall, label), samples if len(samples) == len(logged) else ())
        if area is not None:
            name = f"RULER, mean of {len(logged)} {'task' if len(logged) == 1 else 'tasks'}"
            found.append(CurveNumber(setting=label, task=name, metric=SCORE, area=area))
    return found


def _recall(results: Results) -> list[CurveNumber]:
    table = results.measurements
    rows = table[(table["family"] == "recall") & (table["metric"] == _RECALL_METRIC)]
    rows = rows.dropna(subset=["context_length_tokens"])
    found = []
    for label, task in dict.fromkeys(rows[["setting", "task"]].itertuples(index=False, name=None)):
        own = rows[(rows["setting"] == label) & (rows["task"] == task)]
        logged = results[SAMPLE_SCORES].get((label, task))
        samples = [scores_by_length(logged, _RECALL_METRIC)] if logged is not None else []
        area = score_area(by_length(own, label), samples)
        if area is not None:
            found.append(CurveNumber(setting=label, task=f"{task}, exact answers", metric=SCORE, area=area))
    return found


def tabulate_numbers(numbers: tuple[CurveNumber, ...]) -> pd.DataFrame:
    """Returns one row a number, columns `COLUMNS`: areas, and effective lengths in tokens, NaN where there is none."""
    rows: list[tuple[object, ...]] = []
    for one in numbers:
        area, place = one.area, (one.setting, one.task)
        unit = "nats per token" if one.metric == NLL_CHANGE else "score"
        rest = (area.units, area.doubtful)
        ends = (area.from_tokens, area.to_tokens)
        rows.append((*place, one.metric, unit, *ends, area.estimate, area.low, area.high, *rest))
        if (own := one.effective) is not None:
            rows.append((*place, EFFECTIVE, "tokens", *ends, own.tokens, own.low, own.high, *rest))
    table = pd.DataFrame(rows, columns=COLUMNS)
    kinds = dict.fromkeys(["value", "ci95_low", "ci95_high"], "float64") | {"units": "Int64"}
    return table.astype(kinds)
