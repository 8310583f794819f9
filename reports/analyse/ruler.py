"""RULER's averages over tasks, its weighted averages over lengths, and effective context lengths.

All lines of one figure must be means over the same tasks. `averaged_alike` therefore decides over which tasks, and for
which models, scores are averaged.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from sbeval.reports.analyse.left_out import on_other_samples, samples_key
from sbeval.reports.analyse.statistics import mean_interval, share_interval
from sbeval.reports.read.fields import length_text, name_list, quote_name
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
"""Name of a metric: the share of answers for which the model's thinking was cut off at its token budget."""
ALIAS_SHARES = ("ruler_qa_squad", "ruler_qa_hotpot")
"""lm-eval's own QA tasks. They score the share of an answer's aliases that is found; RULER accepts any alias."""
ALIAS_TEXT = "lm-eval's ruler_qa tasks score the share of an answer's aliases found, RULER any of them"
AVERAGED_TASKS = {"all tasks": TASKS, "needle tasks": NIAH_TASKS, "variable tracking": ("vt",)}
WEIGHTED_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)

ABSOLUTE_THRESHOLD = 0.856
RELATIVE_THRESHOLD = 0.85
NEAR_CHANCE = 0.10
_NO_DIGESTS = pd.Series([], dtype=object)
Scores = Mapping[int, float]
"""Context length to a score, or to an end of its interval."""


class EffectiveLength(NamedTuple):
    """An effective context length.

    Attributes:
        text: a length such as "16K"; "<4K" if the score at 4K, the shortest length run, is too low; ">64K" if the score
            at 64K, the longest length run, is high enough; or "n/a".
        reason: why `text` is "n/a"; else empty.
        interval: the effective lengths computed from the lower and from the upper ends of the scores' 95% intervals;
            None if the scores have no intervals.
    """

    text: str
    reason: str = ""
    interval: tuple[str, str] | None = None

    @property
    def shown(self) -> str:
        """The length as shown on the page: "≥ 64K" for ">64K", since nothing is known beyond the longest length run."""
        return at_least(self.text)

    @property
    def shown_interval(self) -> tuple[str, str] | None:
        """The ends of the interval as shown on the page."""
        return self.interval and (at_least(self.interval[0]), at_least(self.interval[1]))


OTHER_SAMPLES = EffectiveLength(text="n/a", reason="other samples were left at other lengths")


def at_least(text: str) -> str:
    """Replaces ">" by "≥": RULER writes ">64K" if the score at 64K, the longest length run, is high enough."""
    return text.replace(">", "\N{GREATER-THAN OR EQUAL TO} ")


def short_name(task: str) -> str:
    """Returns the name that RULER gives a task: `sb_ruler_vt`, `ruler_vt` and `vt` are all `vt`.

    The tasks `ALIAS_SHARES` keep their names, since they do not count in RULER's averages and effective lengths.
    """
    return task if task in ALIAS_SHARES else task.removeprefix("sb_").removeprefix("ruler_")


def ruler_scores(measurements: pd.DataFrame, metric: str = "score") -> pd.DataFrame:
    """Returns the rows with RULER scores from the tidy table (one row for each measured number).

    A column `ruler_task` is added, and confidence intervals are computed for rows without one. If a model was not run
    on sbeval's version of a task, the score of lm-eval's own RULER task is used. Rows of `ALIAS_SHARES` are included
    under their own names, but averages use only `TASKS`. For a metric other than "score", rows of all tasks are
    returned.
    """
    rows = measurements[(measurements["metric"] == metric) & measurements["context_length_tokens"].notna()].copy()
    rows["ruler_task"] = rows["task"].map(short_name)
    # lm-eval's own tasks record the number of samples of all lengths together; the number at one length is unknown
    rows["samples"] = rows["samples"].where(rows["family"].notna())
    lows, highs = share_interval(rows)
    rows["ci95_low"] = rows["ci95_low"].fillna(lows)
    rows["ci95_high"] = rows["ci95_high"].fillna(highs)
    if metric == "score":
        rows = rows[rows["ruler_task"].isin([*TASKS, *ALIAS_SHARES])]
    ours_first = rows["task"].str.startswith("sb_").sort_values(ascending=False, kind="stable").index
    repeated = rows.loc[ours_first].duplicated(["setting", "ruler_task", "context_length_tokens"])
    return rows[~repeated.reindex(rows.index)].reset_index(drop=True)


def filled_by(models: Sequence[EvaluatedModel]) -> dict[str, tuple[str, ...]]:
    """Returns the code that generated RULER's prompts (`TaskRecord.scripts` or "sbeval") to the models run with it."""
    labels_by_rule: dict[str, dict[str, None]] = {}
    for model in models:
        for record in (task.record for run in model.runs for task in run.tasks):
            if record is not None and record.family == "ruler":
                labels_by_rule.setdefault(record.scripts or "sbeval", {})[model.label] = None
    return {rule: tuple(labels) for rule, labels in labels_by_rule.items()}


def missing_tasks(scores: pd.DataFrame, model: str) -> tuple[str, ...]:
    """Returns those of RULER's 13 tasks that a model did not run at any length."""
    run = set(scores[scores["setting"] == model]["ruler_task"])
    return tuple(task for task in TASKS if task not in run)


def apart(scores: pd.DataFrame) -> dict[str, tuple[str, ...]]:
    """Returns model label to those of its tasks that do not count in RULER's averages (`ALIAS_SHARES`)."""
    rows = scores[scores["ruler_task"].isin(ALIAS_SHARES)].groupby("setting", sort=False)["ruler_task"]
    return {str(model): tuple(dict.fromkeys(tasks)) for model, tasks in rows}


def average(scores: pd.DataFrame, tasks: Sequence[str]) -> pd.DataFrame:
    """Averages each model's scores over those of `tasks` that it ran, at lengths at which it has a score for all these.

    Returns:
        A table with columns setting (the model's label), context_length_tokens, value, ci95_low, ci95_high, tasks
        (number of tasks averaged) and samples_sha256 (which samples were left, None for all). The interval assumes
        independent tasks; it is NaN if the score of some task has no interval.
    """
    rows = []
    chosen = scores[scores["ruler_task"].isin(tasks)]
    for model, of_model in chosen.groupby("setting", sort=False):
        complete = of_model["ruler_task"].nunique()
        for length, at_length in of_model.groupby("context_length_tokens"):
            if at_length["ruler_task"].nunique() == complete:
                interval = mean_interval(*(at_length[column] for column in ("value", "ci95_low", "ci95_high")))
                left = samples_key(at_length.sort_values("ruler_task").get("samples_sha256", _NO_DIGESTS))
                rows.append((model, length, float(at_length["value"].mean()), *interval, complete, left))
    columns = ["setting", "context_length_tokens", "value", "ci95_low", "ci95_high", "tasks", "samples_sha256"]
    return pd.DataFrame.from_records(rows, columns=columns)


def without_mean(scores: pd.DataFrame, tasks: Sequence[str]) -> str:
    """Returns a sentence on lengths that have no `average`, since a model lacks the score of some task; else empty."""
    chosen = scores[scores["ruler_task"].isin(tasks)]
    places: dict[tuple[str, int], list[str]] = {}
    for model, of_model in chosen.groupby("setting", sort=False):
        ran = [task for task in tasks if (of_model["ruler_task"] == task).any()]
        for length, at_length in of_model.groupby("context_length_tokens"):
            if lacking := [task for task in ran if not (at_length["ruler_task"] == task).any()]:
                places[str(model), int(str(length))] = lacking
    parts = [
        f"at {length_text(length)} for {quote_name(model)}, which has no score of {name_list(lacking, at_most=4)} there"
        for (model, length), lacking in places.items()
    ]
    return f"No mean {'; '.join(parts)}." if parts else ""


def by_length(
    table: pd.DataFrame, model: str, column: str = "context_length_tokens", numbers: str = "value"
) -> dict[int, float]:
    """Returns one model's values by context length (or by another column), in ascending order.

    Args:
        table: a table whose column `setting` holds model labels.
        model: label of the model.
        column: name of the column with the integers that become keys.
        numbers: name of the column with the values.
    """
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
    """Computes RULER's effective length: the longest length such that it and all shorter ones reach a threshold score.

    Args:
        scores: context length to the mean score over all 13 tasks.
        threshold: the lowest sufficient score.
        missing: tasks that were not run. The threshold is meant for the mean over all 13 tasks, so the effective length
            is "n/a" if any is missing.
        ends: the lower and the upper ends of the scores' confidence intervals, each by context length.
    """
    if missing:
        count = "one was" if len(missing) == 1 else f"{len(missing)} were"
        return EffectiveLength(text="n/a", reason=f"it needs all {len(TASKS)} tasks, and {count} not run")
    if not scores:
        return EffectiveLength(text="n/a", reason="no score over all its tasks at one length")
    return passing_length(scores, threshold, ends)


def relative_effective_length(
    scores: Mapping[int, float], training_length_tokens: int | None, ends: tuple[Scores, Scores] | None = None
) -> EffectiveLength:
    """Computes the effective length relative to the same model's score in short contexts.

    The base score is the model's score at the longest length of at most half its training length. The effective length
    is the longest length such that it and all shorter ones beyond the base keep 85% of the base score. The lower end of
    its interval is computed from the lower ends of the scores and the upper end of the base score; the upper end from
    the opposite ends.

    Args:
        scores: context length to score.
        training_length_tokens: the model's training length; None if it is not recorded.
        ends: the lower and the upper ends of the scores' confidence intervals, each by context length.
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

    def passing(of_lengths: Mapping[int, float], base_score: float) -> EffectiveLength:
        longer = {length: score for length, score in of_lengths.items() if length > max(short)}
        # the length of the base score always reaches the threshold
        return last_passing({max(short): math.inf, **longer}, RELATIVE_THRESHOLD * base_score)

    length = passing(scores, base)
    if ends is None or _unknown(ends):
        return length
    low, high = (passing(ends[side], ends[1 - side][max(short)]).text for side in (0, 1))
    return length._replace(interval=(low, high))


def weighted_averages(scores: Mapping[int, float]) -> tuple[float, float] | None:
    """Returns RULER's two weighted averages over 4K to 128K: weights that increase, and that decrease, with length.

    Returns None unless all six lengths were run.
    """
    if any(length not in scores for length in WEIGHTED_LENGTHS):
        return None
    values = [scores[length] for length in WEIGHTED_LENGTHS]
    total = sum(range(1, len(values) + 1))
    increasing = sum(weight * value for weight, value in enumerate(values, start=1)) / total
    decreasing = sum((len(values) - place) * value for place, value in enumerate(values)) / total
    return increasing, decreasing


def last_passing(scores: Mapping[int, float], threshold: float) -> EffectiveLength:
    """Returns the longest length such that the scores at it and at all shorter lengths are at least the threshold."""
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
    """Returns `last_passing` of the scores, and its interval: `last_passing` of the lower and of the upper ends.

    There is no interval if an end of the interval of some score is unknown.
    """
    length = last_passing(scores, threshold)
    if ends is None or _unknown(ends):
        return length
    low, high = (last_passing(end, threshold).text for end in ends)
    return length._replace(interval=(low, high))


def _unknown(ends: tuple[Scores, Scores]) -> bool:
    return any(math.isnan(score) for end in ends for score in end.values())


class RulerScores(NamedTuple):
    """RULER scores, averages and effective lengths of all models.

    Attributes:
        scores: the rows of `ruler_scores`.
        overall: each model's mean over the tasks that it ran, as `average` returns it.
        effective: model label to (effective length by RULER's threshold over all 13 tasks, effective length relative to
            the model's score in short contexts over the tasks that it ran).
    """

    scores: pd.DataFrame
    overall: pd.DataFrame
    effective: Mapping[str, tuple[EffectiveLength, EffectiveLength]]


def rate_ruler(measurements: pd.DataFrame, training_lengths: Mapping[str, int]) -> RulerScores:
    """Computes RULER scores and effective lengths of all models.

    Args:
        measurements: the tidy table: one row for each measured number.
        training_lengths: model label to training length in tokens, for models whose training length is known.
    """
    scores = ruler_scores(measurements)
    overall = average(scores, TASKS)
    effective: dict[str, tuple[EffectiveLength, EffectiveLength]] = {}
    for label in dict.fromkeys(scores["setting"]):
        if on_other_samples(scores[(scores["setting"] == label) & scores["ruler_task"].isin(TASKS)]):
            effective[label] = (OTHER_SAMPLES, OTHER_SAMPLES)
            continue
        means = by_length(overall, label)
        ends = by_length(overall, label, numbers="ci95_low"), by_length(overall, label, numbers="ci95_high")
        effective[label] = (
            absolute_effective_length(means, missing=missing_tasks(scores, label), ends=ends),
            relative_effective_length(means, training_lengths.get(label), ends),
        )
    return RulerScores(scores=scores, overall=overall, effective=effective)


def effective_sentences(ruler: RulerScores) -> dict[str, list[str]]:
    """Returns model label to the sentences that the summary shows on the model's effective lengths."""
    sentences = {}
    for label, (absolute, relative) in ruler.effective.items():
        count = len(TASKS) - len(missing_tasks(ruler.scores, label))
        tasks = "all 13 tasks" if count == len(TASKS) else f"the {'one' if count == 1 else count} of 13 tasks run"
        sentences[label] = [
            f"Effective length on RULER: {_effective_length_text(absolute)} at the benchmark's threshold of "
            f"{ABSOLUTE_THRESHOLD:.1%}, {_effective_length_text(relative)} at {RELATIVE_THRESHOLD:.0%} of its own "
            f"short-context score over {tasks}."
        ]
    return sentences


def _effective_length_text(length: EffectiveLength) -> str:
    if length.reason:
        return f"{length.text} ({length.reason})"
    return length.shown + (f" [{', '.join(length.shown_interval)}]" if length.shown_interval else "")


class Alike(NamedTuple):
    """Tasks to average over, and the scores of the models that ran all of them.

    Attributes:
        tasks: the tasks to average over.
        scores: the table rows of the models that ran all of these tasks.
        name: name of the average if it leaves out some of the requested tasks; else empty.
        explanation: a sentence on which tasks are averaged for which models, and which models are left out.
    """

    tasks: tuple[str, ...]
    scores: pd.DataFrame
    name: str
    explanation: str


def averaged_alike(scores: pd.DataFrame, tasks: Sequence[str]) -> list[Alike]:
    """Returns the averages over `tasks` that figures can show: at most two.

    One is over all of the tasks, for models that ran all of them. If some model did not run all, there may be another
    one over the tasks that every model ran. Models that ran none of the tasks are ignored.
    """
    chosen = scores[scores["ruler_task"].isin(tasks)]
    ran = {str(model): frozenset(rows["ruler_task"]) for model, rows in chosen.groupby("setting", sort=False)}
    if not ran:
        return []
    averages = []
    complete = [model for model, names in ran.items() if len(names) == len(tasks)]
    if complete:
        incomplete = [model for model in ran if model not in complete]
        left_out = f" Left out, since they did not run them all: {', '.join(incomplete)}." if incomplete else ""
        count = f"{len(tasks)} tasks" if len(tasks) > 1 else "one task"
        explanation = f"Mean over {count}.{left_out}" if len(tasks) > 1 or left_out else ""
        averages.append(Alike(tuple(tasks), chosen[chosen["setting"].isin(complete)], "", explanation))
    shared = tuple(task for task in tasks if all(task in names for names in ran.values()))
    if shared and len(shared) < len(tasks):
        count = f"{len(shared)} of {len(tasks)}"
        counted = f"the {count} tasks" if len(shared) > 1 else f"the one of {len(tasks)} tasks"
        everyone = "every model here ran" if len(ran) > 1 else "run"
        name = f"{count} {'needle tasks' if all(task.startswith('niah') for task in tasks) else 'tasks'}"
        explanation = f"Mean over {', '.join(shared)}: {counted} {everyone}."
        averages.append(Alike(shared, chosen[chosen["ruler_task"].isin(shared)], name, explanation))
    return averages
