"""Everything a report is made from: the tidy table, and what readers find beside it.

A reader brings one kind of data that runs hold beside single numbers, and says how training seeds become one.
"""

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Everything a report draws and says; `results[READER]` is what a reader brought.

    Attributes:
        models: the lines of the figures, in the order shown.
        measurements: one row a number, columns `measurements.COLUMNS`; NaN where missing.
        by_reader: each reader to what it brought.
        notes: what was left out and why.
    """

    models: tuple[EvaluatedModel, ...]
    measurements: pd.DataFrame
    by_reader: Mapping[Reader[Any], Any]
    notes: Notes

    def __getitem__(self, reader: Reader[T]) -> T:
        """Returns what a reader brought."""
        brought: T = self.by_reader[reader]
        return brought

    def model(self, label: str) -> EvaluatedModel:
        """Returns the model of a label."""
        return next(model for model in self.models if model.label == label)

    @property
    def tasks(self) -> list[str]:
        """Names of all tasks of which a number or a reader's data is there."""
        names = self.measurements["task"].tolist()
        for brought in self.by_reader.values():
            names += brought["task"].tolist() if isinstance(brought, pd.DataFrame) else [task for _, task in brought]
        return list(dict.fromkeys(names))


def restricted(rows: Any, labels: set[str], tasks: set[str]) -> Any:
    """Returns the part of what a reader returned that is about these models and tasks."""
    if isinstance(rows, pd.DataFrame):
        return rows[rows["setting"].isin(labels) & rows["task"].isin(tasks)].reset_index(drop=True)
    return {(label, task): value for (label, task), value in rows.items() if label in labels and task in tasks}


def averaging(average: Callable[[Sequence[T]], T]) -> Callable[..., dict[TaskKey, T]]:
    """Returns the `Reader.pool` of a mapping whose values are averaged over seeds."""

    def pool(by_seed: Mapping[TaskKey, T], pooled_label: Mapping[str, str], notes: Notes) -> dict[TaskKey, T]:
        groups: dict[TaskKey, list[T]] = defaultdict(list)
        for (label, task), value in by_seed.items():
            groups[pooled_label.get(label, label), task].append(value)
        return {key: members[0] if len(members) == 1 else average(members) for key, members in groups.items()}

    return pool


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns a table's rows as dictionaries by column name."""
    if frame.empty:
        return []
    columns = {str(name): column.tolist() for name, column in frame.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def by_model(frame: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Returns model label to its rows as dictionaries, in the table's order."""
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for row in records(frame):
        rows_of.setdefault(row["setting"], []).append(row)
    return rows_of
