"""Rows of all models: readers, how rows are restricted to some models and tasks, and how training seeds become one."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import pandas as pd

from sbeval.reports.read.files import Notes
from sbeval.reports.read.models import EvaluatedModel

T = TypeVar("T")
TaskKey = tuple[str, str]
"""A model's label and a task's name."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reader(Generic[T]):
    """Reads one kind of data that runs hold beside single numbers.

    Attributes:
        read: takes all models and the notes; returns a table with columns `setting` (the model's label) and `task`, or
            a mapping from `TaskKey`.
        pool: shows training seeds as one model: takes what `read` returned, the label of each seed's model to its
            group's label, and the notes.
    """

    read: Callable[[Sequence[EvaluatedModel], Notes], T]
    pool: Callable[[T, Mapping[str, str], Notes], T]


def averaging(average: Callable[[Sequence[T]], T]) -> Callable[..., dict[TaskKey, T]]:
    """Returns the `Reader.pool` of a mapping whose values are averaged over seeds."""

    def pool(found: Mapping[TaskKey, T], pooled_label: Mapping[str, str], notes: Notes) -> dict[TaskKey, T]:
        parts: dict[TaskKey, list[T]] = defaultdict(list)
        for (label, task), value in found.items():
            parts[pooled_label.get(label, label), task].append(value)
        return {key: members[0] if len(members) == 1 else average(members) for key, members in parts.items()}

    return pool


def restricted(rows: Any, labels: set[str], tasks: set[str]) -> Any:
    """Returns the part of what a reader returned that is about these models and tasks."""
    if isinstance(rows, pd.DataFrame):
        return rows[rows["setting"].isin(labels) & rows["task"].isin(tasks)].reset_index(drop=True)
    return {(label, task): value for (label, task), value in rows.items() if label in labels and task in tasks}


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns a table's rows as dictionaries by column name."""
    if frame.empty:
        return []
    columns = {str(name): column.tolist() for name, column in frame.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def by_model(frame: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Returns model label to its rows as dictionaries, in the table's order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in records(frame):
        found.setdefault(row["setting"], []).append(row)
    return found
