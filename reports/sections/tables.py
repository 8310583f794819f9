"""The section of tables: ordinary tasks side by side, the paper's tables with this report's numbers beside them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval import paper as the_paper
from sbeval.reports.analyse.recall import is_drawn
from sbeval.reports.analyse.suite import SuiteRow
from sbeval.reports.read.results import Results, records
from sbeval.reports.sections.section import Section
from sbeval.reports.write.html import Markup, element, name, table
from sbeval.results.records import parse_metric_key

_BESIDE_SCORE = "Measures beside the share of answers found, such as teacher-forced ones; each column is one length."


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PublishedTable:
    """One of the paper's tables.

    Attributes:
        number: the paper's number of the table.
        columns: its columns of which something was measured.
        published: row of the paper to (column to value).
        measured: model to (column to value, in the column's own unit).
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
                for model, value in _numbers(measurements, column).items():
                    measured.setdefault(model, {})[column.column] = value
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
    """Returns model to the measured number of a column, in the column's unit."""
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


def tables_section(results: Results, rows: Sequence[SuiteRow], baseline: str) -> Section | None:
    """Builds the section from the rows of ordinary tasks and the rest, None where no such task was run."""
    labels = [model.label for model in results.models]
    content: list[Markup] = [_suite_table(rows, labels, baseline)] if rows else []
    content += [_published_table(published, labels) for published in published_tables(results.measurements)]
    ruler = results.measurements[results.measurements["family"] == "ruler"]
    recall = results.measurements[results.measurements["family"] == "recall"]
    others = recall[[not is_drawn(metric) for metric in recall["metric"]]]
    forced = pd.concat([ruler[ruler["metric"] != "score"], others])
    for task in dict.fromkeys(forced["task"]):
        of_task = forced[forced["task"] == task]
        content.append(_counted_table(of_task, f"Beside the score: {task}", _BESIDE_SCORE, labels))
    if not content:
        return None
    lead = f"Best in bold; differences are to {baseline}." if rows and len(labels) > 1 else ""
    return Section(identifier="tables", title="Tables", lead=lead, content=tuple(content))


def _suite_table(rows: Sequence[SuiteRow], labels: Sequence[str], baseline: str) -> Markup:
    shown = [label for label in labels if any(label in row.cells for row in rows)]
    body = [[row.name, *[_suite_cell(row, label, baseline) for label in shown]] for row in rows]
    return table(
        ["task", *map(name, shown)],
        body,
        caption="Ordinary tasks",
        explanation=(
            "Small print: standard error, and the difference to the baseline with its 95% interval. It is paired over "
            "the same questions where both runs logged their samples; where marked unpaired, the runs are taken as "
            "independent, which makes the interval wider."
        ),
    )


def _suite_cell(row: SuiteRow, label: str, baseline: str) -> Markup:
    if label not in row.cells:
        return element("td", "not measured", attributes={"class": "missing"})
    cell = row.cells[label]
    value = f"{cell.value:.4f}" if abs(cell.value) < 10 else f"{cell.value:,.2f}"
    shown = element("b", value) if label in row.best else value
    error = "" if cell.stderr != cell.stderr else element("small", f"± {cell.stderr:.4f}")
    difference = row.difference(label, baseline)
    against = (
        ""
        if difference is None
        else element(
            "small",
            f"{difference.estimate:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]",
            "" if difference.samples else " unpaired",
        )
    )
    return element("td", shown, error, against)


def _published_table(published: PublishedTable, labels: Sequence[str]) -> Markup:
    lower = [column for column in published.columns if column.lower().startswith("wikitext")]
    everything = [*published.published.values(), *published.measured.values()]
    tops = {
        column: best([values.get(column) for values in everything], higher_is_better=column not in lower)
        for column in published.columns
    }
    body = [
        [element("span", f"paper: {row}"), *_published_cells(values, published.columns, tops)]
        for row, values in published.published.items()
    ]
    body += [
        [name(label), *_published_cells(published.measured[label], published.columns, tops)]
        for label in labels
        if label in published.measured
    ]
    explanation = "Published values and this report's, in the paper's units; best in bold."
    return table(
        ["model", *published.columns], body, caption=f"The paper's Table {published.number}", explanation=explanation
    )


def _published_cells(
    values: Mapping[str, float], columns: Sequence[str], tops: Mapping[str, float | None]
) -> list[Markup]:
    cells = []
    for column in columns:
        if column not in values:
            cells.append(element("td", "not measured", attributes={"class": "missing"}))
            continue
        words = f"{values[column]:.1f}"
        cells.append(element("td", element("b", words) if values[column] == tops[column] else words))
    return cells


def _counted_table(rows: pd.DataFrame, caption: str, explanation: str, labels: Sequence[str]) -> Markup:
    counts = sorted({int(count) for count in rows["context_length_tokens"].dropna()})
    columns: list[int | None] = [*counts] or [None]
    found: dict[tuple[str, str], dict[int | None, float]] = {}
    for row in records(rows):
        length = None if pd.isna(row["context_length_tokens"]) else int(row["context_length_tokens"])
        found.setdefault((row["setting"], row["metric"]), {})[length] = row["value"]
    body = []
    for label in labels:
        for metric in dict.fromkeys(rows["metric"]):
            if (values := found.get((label, metric))) is None:
                continue
            cells: list[object] = [
                f"{values[count]:.4g}"
                if count in values
                else element("td", "not measured", attributes={"class": "missing"})
                for count in columns
            ]
            body.append([element("span", name(label), f" {metric}"), *cells])
    header = ["model and metric", *[f"{count:,}" for count in counts]] if counts else ["model and metric", "value"]
    return table(header, body, caption=caption, explanation=explanation)
