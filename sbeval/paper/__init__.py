"""The paper's published values, and the lm-eval metric that each column is compared with.

Source: Tan, Yang, Courville, Panda, Shen, "Scaling Stick-Breaking Attention: An Efficient Implementation and In-depth
Study" (ICLR 2025, arXiv 2410.17980).

`values.csv` holds the cells of Tables 1 to 5; a report shows a table beside the measured values. The paper's column
"Avg." is the mean over all columns except wikitext's perplexity.
"""

import csv
from importlib.resources import files
from typing import NamedTuple


class PublishedValue(NamedTuple):
    """One cell of a table in the paper.

    Attributes:
        table: number of the table.
        row: name of the row.
        column: name of the column.
        value: the number, in the unit that the column has in the paper.
        source: place in the paper that the number was read from.
    """

    table: int
    row: str
    column: str
    value: float
    source: str


class MeasuredColumn(NamedTuple):
    """The lm-eval metric that a table's column is compared with.

    Attributes:
        table: number of the table.
        column: name of the column, as in `PublishedValue`.
        task: lm-eval task or group; "a+b" means the mean of several.
        metric: name of the metric in lm-eval's results, without the filter.
        filter: name of lm-eval's filter.
        shots: number of few-shot examples, None for the task's default.
        scale: factor by which a measured value is multiplied to get the published unit.
    """

    table: int
    column: str
    task: str
    metric: str
    filter: str
    shots: int | None
    scale: float


def published_values() -> list[PublishedValue]:
    """Returns all cells of `values.csv`, in the order of the tables."""
    return [
        PublishedValue(int(row["table"]), row["row"], row["column"], float(row["value"]), row["source"])
        for row in _rows("values.csv")
    ]


def measured_columns() -> list[MeasuredColumn]:
    """Returns the metric to measure for each column of Tables 2 to 5."""
    return [
        MeasuredColumn(
            int(row["table"]),
            row["column"],
            row["task"],
            row["metric"],
            row["filter"],
            int(row["shots"]) if row["shots"] else None,
            float(row["scale"]),
        )
        for row in _rows("columns.csv")
    ]


def _rows(name: str) -> list[dict[str, str]]:
    text = files("sbeval.paper").joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
