"""RULER's averages over tasks, its weighted averages and effective context lengths.

Lines on one axis are means over the same tasks, which decides the models and tasks that one average may show.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from sbeval.reports.analyse.statistics import mean_interval, share_interval
from sbeval.reports.read.fields import in_words, length_text, name_list
from sbeval.reports.read.models import EvaluatedModel

NIAH_TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
)
TASKS = (*NIAH_TASKS, "vt", "cwe", "fwe", "qa_squad", "qa_hotpot")
THINKING_CUT = "thinking_cut"
"""Metric: the share of answers for which the model's thinking had to be ended."""
ALIAS_SHARES = ("ruler_qa_squad", "ruler_qa_hotpot")
"""lm-eval's own QA tasks: they score the share of an answer's aliases, where RULER counts any of them as right."""
ALIAS_WORDS = "lm-eval's ruler_qa tasks score the share of an answer's aliases found, RULER any of them"
AVERAGED_TASKS = {"all tasks": TASKS, "needle tasks": NIAH_TASKS, "variable tracking": ("vt",)}
WEIGHTED_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)

ABSOLUTE_THRESHOLD = 0.856
RELATIVE_THRESHOLD = 0.85
NEAR_CHANCE = 0.10
Scores = Mapping[int, float]
"""Context length to a score, or to an end of its interval."""


class EffectiveLength(NamedTuple):
    """An effective context length: "<4K", "16K", ">64K" or, for a reason, "n/a".

    Attributes:
        interval: the same rule on the lower and on the upper ends of every score's 95% interval; None without them.
    """

    text: str
    reason: str = ""
    interval: tuple[str, str] | None = None

    @property
    def shown(self) -> str:
        """The length as a page says it: of lengths beyond the longest one that was run nothing is known."""
        return at_least(self.text)

    @property
    def shown_interval(self) -> tuple[str, str] | None:
        """The ends of the interval as a page says them."""
        return self.interval and (at_least(self.interval[0]), at_least(self.interval[1]))


def at_least(text: str) -> str:
    """Returns an effective length with what ">" stands for in RULER's tables."""
    return text.replace(">", "\N{GREATER-THAN OR EQUAL TO} ")


def short_name(task: str) -> str:
    """Returns RULER's name of a task, whoever runs it: `sb_ruler_vt`, `ruler_vt` and `vt` are one.

    `ALIAS_SHARES` keep their own names, since their scores are no part of RULER's averages and effective lengths.
    """
    return task if task in ALIAS_SHARES else task.removeprefix("sb_").removeprefix("ruler_")


def ruler_scores(measurements: pd.DataFrame, metric: str = "score") -> pd.DataFrame:
    """Returns the rows of RULER's 13 tasks, with a column `ruler_task`; lm-eval's own where ours was not run.

    Rows of `ALIAS_SHARES` are among them under their own names; averages take `TASKS` alone. Other metrics: all tasks.
    """
    rows = measurements[(measurements["metric"] == metric) & measurements["context_length_tokens"].notna()].copy()
    rows["ruler_task"] = rows["task"].map(short_name)
    rows["samples"] = rows["samples"].where(rows["family"].notna())  # lm-eval's own tasks count all lengths together
    lows, highs = share_interval(rows)
    rows["ci95_low"] = rows["ci95_low"].fillna(lows)
    rows["ci95_high"] = rows["ci95_high"].fillna(highs)
    if metric == "score":
        rows = rows[rows["ruler_task"].isin([*TASKS, *ALIAS_SHARES])]
    ours_first = rows["task"].str.startswith("sb_").sort_values(ascending=False, kind="stable").index
    repeated = rows.loc[ours_first].duplicated(["setting", "ruler_task", "context_length_tokens"])
    return rows[~repeated.reindex(rows.index)].reset_index(drop=True)


def filled_by(models: Sequence[EvaluatedModel]) -> dict[str, tuple[str, ...]]:
    """Returns, by who fills RULER's prompts (`TaskRecord.scripts`, else "sbeval"), the models whose runs say so."""
    labels_by_rule: dict[str, dict[str, None]] = {}
    for model in models:
        for record in (task.record for run in model.runs for task in run.tasks):
            if record is not None and record.family == "ruler":
                labels_by_rule.setdefault(record.scripts or "sbeval", {})[model.label] = None
    return {rule: tuple(labels) for rule, labels in labels_by_rule.items()}


def missing_tasks(scores: pd.DataFrame, model: str) -> tuple[str, ...]:
    """Returns those of the 13 tasks that a model did not run at any length."""
    run = set(scores[scores["setting"] == model]["ruler_task"])
    return tuple(task for task in TASKS if task not in run)


def apart(scores: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    """Returns each model's tasks that are kept apart from RULER's, see `ALIAS_SHARES`."""
    rows = scores[scores["ruler_task"].isin(ALIAS_SHARES)].groupby("setting", sort=False)["ruler_task"]
    return {str(model): tuple(dict.fromkeys(tasks)) for model, tasks in rows}


def average(scores: pd.DataFrame, tasks: Sequence[str]) -> pd.DataFrame:
    """Averages each model's tasks, at those lengths where it has all of them.

    Returns:
        Columns setting, context_length_tokens, value, ci95_low, ci95_high, tasks. The interval assumes independent
        tasks; it is missing where a task has none.
    """
    rows = []
    chosen = scores[scores["ruler_task"].isin(tasks)]
    for model, of_model in chosen.groupby("setting", sort=False):
        complete = of_model["ruler_task"].nunique()
        for length, at_length in of_model.groupby("context_length_tokens"):
            if at_length["ruler_task"].nunique() == complete:
                interval = mean_interval(*(at_length[column] for column in ("value", "ci95_low", "ci95_high")))
                rows.append((model, length, float(at_length["value"].mean()), *interval, complete))
    columns = ["setting", "context_length_tokens", "value", "ci95_low", "ci95_high", "tasks"]
    return pd.DataFrame.from_records(rows, columns=columns)


def without_mean(scores: pd.DataFrame, tasks: Sequence[str]) -> str:
    """Returns a sentence on the lengths at which `average` has none, since a task of the model has no score there."""
    chosen = scores[scores["ruler_task"].isin(tasks)]
    places: dict[tuple[str, int], list[str]] = {}
    for model, of_model in chosen.groupby("setting", sort=False):
        ran = [task for task in tasks if (of_model["ruler_task"] == task).any()]
        for length, at_length in of_model.groupby("context_length_tokens"):
            if lacking := [task for task in ran if not (at_length["ruler_task"] == task).any()]:
                places[str(model), int(str(length))] = lacking
    parts = [
        f"at {length_text(length)} for {in_words(model)}, which has no score of {name_list(lacking, at_most=4)} there"
        for (model, length), lacking in places.items()
    ]
    return f"No mean {'; '.join(parts)}." if parts else ""


def by_length(
    table: pd.DataFrame, model: str, column: str = "context_length_tokens", numbers: str = "value"
) -> dict[int, float]:
    """Returns length (or what another column counts) to value for one model, ascending."""
    rows = (table["setting"] == model).to_numpy()
    lengths, values = table[column].to_numpy()[rows], table[numbers].to_numpy()[rows]
    return dict(sorted((int(length), float(value)) for length, value in zip(lengths, values, strict=True)))


def absolute_effective_length(
    scores: Mapping[int, float],
    threshold: float = ABSOLUTE_THRESHOLD,
    *,
    missing: Sequence[str] = (),
    ends: tuple[Scores, Scores] | None = None,
) -> EffectiveLength:
    """RULER's rule: the longest length such that every length up to it reaches the threshold.

    The threshold is set for the mean of all 13 tasks, so nothing follows from fewer; `missing` names those not run.
    `ends` are the lower and the upper ends of the scores' intervals.
    """
    if missing:
        count = "one was" if len(missing) == 1 else f"{len(missing)} were"
        return EffectiveLength(text="n/a", reason=f"it takes all {len(TASKS)} tasks, and {count} not run")
    if not scores:
        return EffectiveLength(text="n/a", reason="no score over all its tasks at one length")
    return passing_length(scores, threshold, ends)


def relative_effective_length(
    scores: Mapping[int, float], training_length_tokens: int | None, ends: tuple[Scores, Scores] | None = None
) -> EffectiveLength:
    """The longest length that keeps a share of the model's own score at no more than half its training length.

    The lower end of its interval takes the upper end of the own score, and the upper end the lower one.

    Args:
        scores: context length to score.
        training_length_tokens: None where not recorded.
        ends: the lower and the upper ends of the scores' intervals.
    """
    if training_length_tokens is None:
        return EffectiveLength(text="n/a", reason="the training length is not recorded")
    short = [length for length in scores if length <= training_length_tokens / 2]
    if not short:
        limit = length_text(training_length_tokens // 2)
        return EffectiveLength(text="n/a", reason=f"no score at {limit} or below, half its training length")
    base = scores[max(short)]
    if base < NEAR_CHANCE:
        where = length_text(max(short))
        return EffectiveLength(text="n/a", reason=f"the score at {where} ({base:.0%}) is near chance")

    def passing(of_lengths: Mapping[int, float], own: float) -> EffectiveLength:
        kept = {length: score for length, score in of_lengths.items() if length > max(short)}
        return last_passing({max(short): math.inf, **kept}, RELATIVE_THRESHOLD * own)  # the own score keeps all of it

    length = passing(scores, base)
    if ends is None or _unknown(ends):
        return length
    low, high = (passing(ends[side], ends[1 - side][max(short)]).text for side in (0, 1))
    return length._replace(interval=(low, high))


def weighted_averages(scores: Mapping[int, float]) -> tuple[float, float] | None:
    """RULER's averages over 4K to 128K weighted up and down with length; None unless all six lengths are there."""
    if any(length not in scores for length in WEIGHTED_LENGTHS):
        return None
    values = [scores[length] for length in WEIGHTED_LENGTHS]
    total = sum(range(1, len(values) + 1))
    increasing = sum(weight * value for weight, value in enumerate(values, start=1)) / total
    decreasing = sum((len(values) - place) * value for place, value in enumerate(values)) / total
    return increasing, decreasing


def last_passing(scores: Mapping[int, float], threshold: float) -> EffectiveLength:
    """Returns the longest length such that every length up to it reaches the threshold."""
    passing = None
    for length in sorted(scores):
        if scores[length] < threshold:
            text = f"<{length_text(min(scores))}" if passing is None else length_text(passing)
            return EffectiveLength(text=text)
        passing = length
    return EffectiveLength(text=f">{length_text(max(scores))}")


def passing_length(
    scores: Mapping[int, float], threshold: float, ends: tuple[Scores, Scores] | None
) -> EffectiveLength:
    """Returns `last_passing` with its interval, where the ends of every score's interval are known."""
    length = last_passing(scores, threshold)
    if ends is None or _unknown(ends):
        return length
    low, high = (last_passing(end, threshold).text for end in ends)
    return length._replace(interval=(low, high))


def _unknown(ends: tuple[Scores, Scores]) -> bool:
    return any(math.isnan(score) for end in ends for score in end.values())


class RulerScores(NamedTuple):
    """RULER's scores with what follows from them.

    Attributes:
        scores: the rows of RULER's tasks, see `ruler_scores`.
        overall: their mean over the tasks each model ran, see `average`.
        effective: model label to (by RULER's threshold over all 13 tasks, relative to its own score over those it ran).
    """

    scores: pd.DataFrame
    overall: pd.DataFrame
    effective: Mapping[str, tuple[EffectiveLength, EffectiveLength]]


def rate_ruler(measurements: pd.DataFrame, training_lengths: Mapping[str, int]) -> RulerScores:
    """Computes RULER's scores and effective lengths, from the tidy table and model label to training length."""
    scores = ruler_scores(measurements)
    overall = average(scores, TASKS)
    effective = {}
    for label in dict.fromkeys(scores["setting"]):
        means = by_length(overall, label)
        ends = by_length(overall, label, numbers="ci95_low"), by_length(overall, label, numbers="ci95_high")
        effective[label] = (
            absolute_effective_length(means, missing=missing_tasks(scores, label), ends=ends),
            relative_effective_length(means, training_lengths.get(label), ends),
        )
    return RulerScores(scores=scores, overall=overall, effective=effective)


def effective_sentences(ruler: RulerScores) -> dict[str, list[str]]:
    """Returns the sentences of the summary on effective lengths."""
    sentences = {}
    for label, (absolute, relative) in ruler.effective.items():
        count = len(TASKS) - len(missing_tasks(ruler.scores, label))
        tasks = "all 13 tasks" if count == len(TASKS) else f"the {'one' if count == 1 else count} of 13 tasks run"
        sentences[label] = [
            f"Effective length on RULER: {_length_words(absolute)} at the benchmark's threshold of "
            f"{ABSOLUTE_THRESHOLD:.1%}, {_length_words(relative)} at {RELATIVE_THRESHOLD:.0%} of its own "
            f"short-context score over {tasks}."
        ]
    return sentences


def _length_words(length: EffectiveLength) -> str:
    if length.reason:
        return f"{length.text} ({length.reason})"
    return length.shown + (f" [{', '.join(length.shown_interval)}]" if length.shown_interval else "")


class Alike(NamedTuple):
    """Models averaged over the same tasks, with the rows of those that ran them all.

    `words` name the average where it is not over every task asked for; the explanation says who is left out.
    """

    tasks: tuple[str, ...]
    scores: pd.DataFrame
    words: str
    explanation: str


def averaged_alike(scores: pd.DataFrame, tasks: Sequence[str]) -> list[Alike]:
    """Returns the averages that can be drawn: over all the tasks, and over those every model ran where these differ.

    Models that ran none of the tasks are left aside.
    """
    chosen = scores[scores["ruler_task"].isin(tasks)]
    ran = {str(model): frozenset(rows["ruler_task"]) for model, rows in chosen.groupby("setting", sort=False)}
    if not ran:
        return []
    averages = []
    complete = [model for model, names in ran.items() if len(names) == len(tasks)]
    if complete:
        others = [model for model in ran if model not in complete]
        left_out = f" Left out, since they did not run them all: {', '.join(others)}." if others else ""
        count = f"{len(tasks)} tasks" if len(tasks) > 1 else "one task"
        explanation = f"Mean over {count}.{left_out}" if len(tasks) > 1 or left_out else ""
        averages.append(Alike(tuple(tasks), chosen[chosen["setting"].isin(complete)], "", explanation))
    shared = tuple(task for task in tasks if all(task in names for names in ran.values()))
    if shared and len(shared) < len(tasks):
        count = f"{len(shared)} of {len(tasks)}"
        counted = f"the {count} tasks" if len(shared) > 1 else f"the one of {len(tasks)} tasks"
        everyone = "every model here ran" if len(ran) > 1 else "run"
        words = f"{count} {'needle tasks' if all(task.startswith('niah') for task in tasks) else 'tasks'}"
        explanation = f"Mean over {', '.join(shared)}: {counted} {everyone}."
        averages.append(Alike(shared, chosen[chosen["ruler_task"].isin(shared)], words, explanation))
    return averages
