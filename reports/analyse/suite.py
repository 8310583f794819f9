"""Ordinary tasks (accuracy, perplexity without a context length) side by side for all models."""

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
    """One number with its standard error and number of samples, NaN where unknown."""

    value: float
    stderr: float
    samples: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRow:
    """One metric of one task.

    Attributes:
        name: task, metric, filter and number of examples, as a heading.
        higher_is_better: None where unknown.
        limit: what bounded the inputs, if one model was run with several bounds.
        cells: model to its number; models without one are absent.
        samples: model to the scores of the task's samples, where they were logged.
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
        """Models with the best number, empty where the direction is unknown or there is nothing to compare."""
        if self.higher_is_better is None or len(self.cells) < 2:
            return frozenset()
        chosen = max if self.higher_is_better else min
        top = chosen(cell.value for cell in self.cells.values())
        return frozenset(label for label, cell in self.cells.items() if cell.value == top)

    def difference(self, label: str, baseline: str) -> PairedDifference | None:
        """Returns the difference to the baseline with its 95% interval; no samples where it is not paired.

        Paired over samples where both runs logged them and their mean is the task's number; else from the two standard
        errors, as if the runs had different questions, which is wider.
        """
        if label == baseline or label not in self.cells or baseline not in self.cells:
            return None
        own, base = self.cells[label], self.cells[baseline]
        delta = own.value - base.value
        if label in self.samples and baseline in self.samples:
            key = (self.metric, self.filter_name)
            paired = task_difference(self.samples[label], self.samples[baseline], key)
            if paired is not None and abs(paired.estimate - delta) < 1e-6 and not math.isnan(paired.low):
                return dataclasses.replace(paired, estimate=delta)
        half = 1.96 * math.hypot(own.stderr, base.stderr)
        low, high = delta - half, delta + half
        return None if math.isnan(half) else PairedDifference(estimate=delta, low=low, high=high, samples=0)


def divided_tasks(results: Results) -> set[tuple[str, str]]:
    """Returns (task, field of `InputLimit`) wherever one model ran a task with several values of that field.

    `max_length` counts where it varies on texts of one length: on longer texts it has to be longer.
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
    """Returns the rows of all ordinary tasks; members of a group that has its own number are left out.

    A task that one model ran with several bounds on its inputs has a row for each bound; `divided` says which bounds
    are told apart, None for `divided_tasks(results)`.
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
        words = [
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
                name=shown_name(", ".join(filter(None, words))),
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
    """Whether a higher value of a metric of this name is better; None where its name does not say."""
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
