"""The table of ordinary lm-eval tasks: one row for each metric, with the numbers of all models.

A task is "ordinary" if its metrics are not measured at several context lengths.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from sbeval.reports.analyse.paired import PairedDifference, task_difference
from sbeval.reports.read.fields import display_name, grouped, length_text
from sbeval.reports.read.results import Results, records
from sbeval.reports.read.runs import EvaluationRun, InputLimit
from sbeval.reports.read.samples import SAMPLE_SCORES, SampleScores

_LOWER_IS_BETTER = ("perplexity", "nll", "bits_per_byte")


class SuiteCell(NamedTuple):
    """One model's number, with its standard error and number of samples; these are NaN if they are unknown."""

    value: float
    stderr: float
    samples: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRow:
    """One metric of one task for all models.

    Attributes:
        name: task, metric, filter, number of examples and bounds on the input length, as a heading.
        task: the task's name.
        metric: the metric's name.
        filter_name: name of lm-eval's filter; "none" if the task has no filter.
        higher_is_better: whether a higher number is better; None if it is unknown.
        limit: bounds on the input length; set only if some model was run on the task with several bounds.
        cells: model label to its number; models without a number are absent.
        samples: model label to the scores of the task's samples, for models whose samples were logged.
    """

    name: str
    task: str
    metric: str
    filter_name: str
    higher_is_better: bool | None
    limit: InputLimit
    cells: Mapping[str, SuiteCell]
    samples: Mapping[str, SampleScores]

    @property
    def best(self) -> frozenset[str]:
        """Labels of the models with the best number; empty for a single model or if the better direction is unknown."""
        if self.higher_is_better is None or len(self.cells) < 2:
            return frozenset()
        chosen = max if self.higher_is_better else min
        top = chosen(cell.value for cell in self.cells.values())
        return frozenset(label for label, cell in self.cells.items() if cell.value == top)

    def difference(self, label: str, baseline: str) -> PairedDifference | None:
        """Returns a model's number minus the baseline's, with its 95% interval; None if it cannot be computed.

        The difference is paired by sample if both runs logged samples whose mean is the task's number. Otherwise the
        interval is computed from the two standard errors as if the two models had answered different questions. That
        interval is wider, and `samples` is then 0.
        """
        if label == baseline or label not in self.cells or baseline not in self.cells:
            return None
        cell = self.cells[label]
        base = self.cells[baseline]
        delta = cell.value - base.value
        if label in self.samples and baseline in self.samples:
            key = (self.metric, self.filter_name)
            paired = task_difference(self.samples[label], self.samples[baseline], key)
            if paired is not None and abs(paired.estimate - delta) < 1e-6 and not math.isnan(paired.low):
                return dataclasses.replace(paired, estimate=delta)
        half = 1.96 * math.hypot(cell.stderr, base.stderr)
        low, high = delta - half, delta + half
        return None if math.isnan(half) else PairedDifference(estimate=delta, low=low, high=high, samples=0)


def divided_tasks(results: Results) -> set[tuple[str, str]]:
    """Returns the pairs (task, field of `InputLimit`) for which some model ran the task with several of its values.

    `max_length_tokens` counts only if it varies on texts of the same length, since longer texts need a larger value.
    """
    rows = _ordinary(results)
    divided = set()
    for field, fixed in (("text_length_tokens", []), ("max_length_tokens", ["text_length_tokens"])):
        counts = rows.groupby(["setting", "task", *fixed], dropna=False)[field].nunique(dropna=False)
        divided |= {(str(task), field) for task in counts[counts > 1].index.get_level_values("task")}
    return divided


def _ordinary(results: Results) -> pd.DataFrame:
    rows = results.measurements
    return rows[rows["context_length_tokens"].isna() & rows["family"].isna()]


def suite_rows(results: Results, divided: Collection[tuple[str, str]] | None = None) -> list[SuiteRow]:
    """Returns the rows of all ordinary tasks.

    Tasks of an lm-eval group are left out if the group has a number itself.

    Args:
        results: all results.
        divided: pairs (task, field of `InputLimit`); every value of the field gets a separate row. None means
            `divided_tasks(results)`.
    """
    divided = divided_tasks(results) if divided is None else divided
    rows = _ordinary(results)
    hidden = {task for model in results.models for run in model.runs for task in _group_members(run)}
    rows = rows[~rows["task"].isin(hidden)]

    def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
        bounds = (_known(row[field]) if (row["task"], field) in divided else None for field in InputLimit._fields)
        return *(_known(row[column]) for column in ("task", "metric", "filter", "few_shot")), *bounds

    groups = grouped((key_of(row), row) for row in records(rows))
    every_row = []
    for key in sorted(groups, key=_row_order):
        task, metric, chosen_filter, few_shot, text_length, max_length = key
        heading_parts = [
            task,
            metric,
            None if chosen_filter == "none" else chosen_filter,
            None if few_shot is None else f"{few_shot}-shot",
            None if text_length is None else f"texts of {length_text(text_length)}",
            None if max_length is None else f"max_length {length_text(max_length)}",
        ]
        better = [row["higher_is_better"] for row in groups[key] if not pd.isna(row["higher_is_better"])]
        samples, cells = {}, {}
        for row in groups[key]:
            label = row["setting"]
            limit = InputLimit(*(_known(row[field]) for field in InputLimit._fields))
            cells[label] = SuiteCell(*(float(row[column]) for column in SuiteCell._fields))
            if (label, task) in results[SAMPLE_SCORES]:
                samples[label] = results[SAMPLE_SCORES][label, task].within(limit)
        every_row.append(
            SuiteRow(
                name=display_name(", ".join(filter(None, heading_parts))),
                task=task,
                metric=metric,
                higher_is_better=bool(better[0]) if better else usual_direction(metric),
                filter_name=chosen_filter or "none",
                limit=InputLimit(text_length, max_length),
                samples=samples,
                cells=cells,
            )
        )
    return every_row


def _row_order(key: Sequence[Any]) -> tuple[Any, ...]:
    *names, text, longest = key
    return (*map(str, names), -1 if text is None else text, -1 if longest is None else longest)


def _known(value: Any) -> Any:
    return None if pd.isna(value) else value


def usual_direction(metric: str) -> bool | None:
    """Whether a higher value of a metric is better, judged by the metric's name; None if the name does not tell."""
    if any(word in metric for word in _LOWER_IS_BETTER):
        return False
    return True if metric.startswith(("acc", "exact_match", "f1", "score")) else None


def _group_members(run: EvaluationRun) -> Sequence[str]:
    groups = run.raw.get("group_subtasks")
    measured = {task.name for task in run.tasks}
    if not isinstance(groups, dict):
        return []
    return [
        child
        for group, children in groups.items()
        if group in measured and isinstance(children, list)
        for child in children
        if child in measured
    ]
