"""Ordinary tasks (accuracy, perplexity without a context length) side by side for all models."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import pandas as pd

from sbeval.reports.runs import Run
from sbeval.reports.table import Results, records

_LOWER_IS_BETTER = ("perplexity", "nll", "bits_per_byte")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SuiteCell:
    """One number with its standard error, NaN where unknown."""

    value: float
    stderr: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRow:
    """One metric of one task.

    Attributes:
        name: task, metric, filter and number of examples, as a heading.
        task: lm-eval's task name.
        metric: lm-eval's metric name.
        higher_is_better: None where unknown.
        cells: setting to its number; settings without one are absent.
    """

    name: str
    task: str
    metric: str
    higher_is_better: bool | None
    cells: Mapping[str, SuiteCell]

    @property
    def best(self) -> frozenset[str]:
        """Settings with the best number, empty where the direction is unknown or there is nothing to compare."""
        if self.higher_is_better is None or len(self.cells) < 2:
            return frozenset()
        chosen = max if self.higher_is_better else min
        top = chosen(cell.value for cell in self.cells.values())
        return frozenset(label for label, cell in self.cells.items() if cell.value == top)

    def difference(self, label: str, baseline: str) -> tuple[float, float, float] | None:
        """Returns the difference to the baseline with its 95 % interval, from the two standard errors."""
        if label == baseline or label not in self.cells or baseline not in self.cells:
            return None
        own, base = self.cells[label], self.cells[baseline]
        half = 1.96 * math.hypot(own.stderr, base.stderr)
        if math.isnan(half):
            return None
        delta = own.value - base.value
        return delta, delta - half, delta + half


def suite_rows(results: Results) -> list[SuiteRow]:
    """Returns the rows of all ordinary tasks; members of a group that has its own number are left out."""
    measurements = results.measurements
    rows = measurements[measurements["context_length_tokens"].isna() & measurements["family"].isna()]
    hidden = {task for setting in results.settings for run in setting.runs for task in _group_members(run)}
    rows = rows[~rows["task"].isin(hidden)]
    names = rows[["task", "metric", "filter", "few_shot"]].astype(object)
    texts = names.where(names.notna(), "")
    found = []
    for key in sorted(dict.fromkeys(texts.itertuples(index=False, name=None)), key=str):
        own = records(rows[(texts == list(key)).all(axis=1)])
        task, metric, chosen_filter, few_shot = key
        parts = [task, metric]
        if chosen_filter not in ("", "none"):
            parts.append(chosen_filter)
        if few_shot != "":
            parts.append(f"{few_shot}-shot")
        better = [row["higher_is_better"] for row in own if not pd.isna(row["higher_is_better"])]
        found.append(
            SuiteRow(
                name=", ".join(map(str, parts)),
                task=task,
                metric=metric,
                higher_is_better=bool(better[0]) if better else _direction(metric),
                cells={
                    row["setting"]: SuiteCell(value=float(row["value"]), stderr=float(row["stderr"])) for row in own
                },
            )
        )
    return found


def _direction(metric: str) -> bool | None:
    if any(word in metric for word in _LOWER_IS_BETTER):
        return False
    return True if metric.startswith(("acc", "exact_match", "f1")) else None


def _group_members(run: Run) -> Sequence[str]:
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
