"""The paper's tables with this report's numbers beside them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pandas as pd

from sbeval import paper as the_paper
from sbeval.records import parse_metric_key
from sbeval.reports.table import records


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PublishedTable:
    """One of the paper's tables.

    Attributes:
        number: the paper's number of the table.
        columns: its columns of which something was measured.
        published: row of the paper to (column to value).
        measured: setting to (column to value, in the column's own unit).
    """

    number: int
    columns: tuple[str, ...]
    published: dict[str, dict[str, float]]
    measured: dict[str, dict[str, float]]


def published_tables(measurements: pd.DataFrame, *, paper: Any = the_paper) -> list[PublishedTable]:
    """Returns the paper's tables of which a column was measured and a published value is held.

    Args:
        measurements: the tidy table.
        paper: what holds `published_values()` and `measured_columns()`.
    """
    tables = []
    columns = paper.measured_columns()
    for number in sorted({column.table for column in columns}):
        measured: dict[str, dict[str, float]] = {}
        for column in columns:
            if column.table == number:
                for setting, value in _numbers(measurements, column).items():
                    measured.setdefault(setting, {})[column.column] = value
        known = {name for values in measured.values() for name in values}
        order = [column.column for column in columns if column.table == number and column.column in known]
        published: dict[str, dict[str, float]] = {}
        for value in paper.published_values():
            if value.table == number and value.column in known:
                published.setdefault(value.row, {})[value.column] = value.value
        if published:
            tables.append(PublishedTable(number=number, columns=tuple(order), published=published, measured=measured))
    return tables


def best(values: Sequence[float | None], *, higher_is_better: bool) -> float | None:
    """Returns the best of the numbers there are, None for fewer than two."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    return max(known) if higher_is_better else min(known)


def _numbers(measurements: pd.DataFrame, column: Any) -> dict[str, float]:
    """Returns setting to the measured number of a column, in the column's unit."""
    parsed = parse_metric_key(column.metric)
    metric, length = parsed if parsed is not None else (column.metric, None)
    rows = measurements[(measurements["task"] == column.task) & (measurements["metric"] == metric)]
    lengths = rows["context_length_tokens"]
    rows = rows[lengths.isna() if length is None else (lengths == length).fillna(False)]
    rows = rows[rows["filter"].fillna("none") == column.filter]
    if column.shots is not None:
        rows = rows[(rows["few_shot"] == column.shots).fillna(False)]
    found: dict[str, float] = {}
    for row in records(rows):  # the newest first, where a task was run with several bounds on its inputs
        found.setdefault(row["setting"], float(row["value"]) * column.scale)
    return found
