"""Ordinary lm-eval tasks, whose metrics name no context length: one row for each metric, with all models' numbers."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from sbeval.reports.analyse.paired import PairedDifference, task_difference
from sbeval.reports.read.fields import grouped, length_text, shown_name
from sbeval.reports.read.results import Results, records
from sbeval.reports.read.runs import EvaluationRun, InputLimit
from sbeval.reports.read.samples import SAMPLE_SCORES, SampleScores

_LOWER_IS_BETTER = ("perplexity", "nll", "bits_per_byte")


class SuiteCell(NamedTuple):
    """One model's number, with its standard error and number of samples; NaN where unknown."""

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
        filter_name: lm-eval's filter, "none" for none.
        higher_is_better: None where unknown.
        limit: bounds on the input length, where some model was run with several.
        cells: model label to its number; models without one are absent.
        samples: model label to the scores of the task's samples, where they were logged.
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
        """Models with the best number; empty if it is unknown which direction is better, or for a single model."""
        if self.higher_is_better is None or len(self.cells) < 2:
            return frozenset()
        chosen = max if self.higher_is_better else min
        top = chosen(cell.value for cell in self.cells.values())
        return frozenset(label for label, cell in self.cells.items() if cell.value == top)

    def difference(self, label: str, baseline: str) -> PairedDifference | None:
        """Returns the difference to the baseline with its 95% interval; None where it cannot be computed.

        It is paired by sample if both runs logged samples whose mean is the task's number. Otherwise the interval is
        computed from the two standard errors as if the questions were different, which is wider, and `samples` is 0.
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
    """Returns (task, field of `InputLimit`) wherever some model ran a task with several values of that field.

    `max_length_tokens` counts only if it varies on texts of the same length, since longer texts need a larger one.
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
    """Returns the rows of all ordinary tasks, without members of a group that has a number itself.

    Args:
        results: all results.
        divided: (task, field of `InputLimit`) for which each value gets its own row; None for `divided_tasks(results)`.
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
                name=shown_name(", ".join(filter(None, heading_parts))),
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
    """Whether a higher value of a metric is better, judged by its name; None where the name does not say."""
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
