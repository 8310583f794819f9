"""The paper's published values, and which measured number belongs beside each column.

Source: Tan, Yang, Courville, Panda, Shen, "Scaling Stick-Breaking Attention: An Efficient Implementation and In-depth
Study" (ICLR 2025, arXiv 2410.17980).

`values.csv` holds Tables 1 to 5, cell by cell, with the table, row and column of each; a report puts a table beside
what was measured of it. The mean that the paper calls "Avg." is over all columns but wikitext's perplexity.
"""

import csv
from importlib.resources import files
from typing import NamedTuple, TypeVar

from pydantic import TypeAdapter

Row = TypeVar("Row")


class PublishedValue(NamedTuple):
    """One cell of a table.

    Attributes:
        table: number of the table.
        row: name of the row.
        column: name of the column.
        value: the number, in the column's own unit.
        source: where it was read.
    """

    table: int
    row: str
    column: str
    value: float
    source: str


class MeasuredColumn(NamedTuple):
    """The lm-eval number that a table's column is compared with.

    Attributes:
        table: number of the table.
        column: name of the column, as in `PublishedValue`.
        task: lm-eval task or group; several with a plus between them stand for their mean.
        metric: metric key as lm-eval prints it, without the filter.
        filter: lm-eval's filter.
        shots: number of examples in the prompt, None where the task decides.
        scale: factor from the measured number to the printed one.
    """

    table: int
    column: str
    task: str
    metric: str
    filter: str
    shots: int | None
    scale: float


def published_values() -> list[PublishedValue]:
    """Returns every cell that is held here, in the order of the tables."""
    return _read(PublishedValue, "values.csv")


def measured_columns() -> list[MeasuredColumn]:
    """Returns what to measure for each column of Tables 2 to 5."""
    return _read(MeasuredColumn, "columns.csv")


def _read(kind: type[Row], name: str) -> list[Row]:
    """Returns a file's rows, whose columns are the fields; what stands in none is None."""
    lines = files("sbeval.paper").joinpath(name).read_text(encoding="utf-8").splitlines()
    rows = [{column: cell or None for column, cell in row.items()} for row in csv.DictReader(lines)]
    return TypeAdapter(list[kind]).validate_python(rows)  # type: ignore[valid-type]
