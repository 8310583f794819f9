"""Sections on ordinary lm-eval tasks: tables, figures by input length, and tables of the paper beside measured numbers.

"The paper" is the one whose numbers `sbeval.paper` holds.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from sbeval import paper as the_paper
from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.ruler import THINKING_CUT, by_length
from sbeval.reports.analyse.statistics import score_interval
from sbeval.reports.analyse.suite import SuiteRow, suite_rows
from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import SHARES, length_figure
from sbeval.reports.kinds.recall import is_drawn
from sbeval.reports.read.fields import display_name, grouped, length_text, listed, quote_name
from sbeval.reports.read.results import LENGTH, column_values, records
from sbeval.reports.section import NOT_MEASURED, Cell, Figure, Kind, Material, Section, Table
from sbeval.results.intervals import with_interval
from sbeval.results.records import parse_metric_key

_SHOWN = 4
_TOOLTIP = {"setting": "model", "length_text": "input", "value_text": "value", "interval_text": "95% interval"}
_COLUMNS = ["setting", "context_length_tokens", "value", "ci95_low", "ci95_high"]
_AVERAGE = "Avg."
_NOT_AVERAGED = "Wikitext"
"""Column of the paper's tables that holds a perplexity. It is therefore not included in their average."""


class PublishedTable(NamedTuple):
    """A table of the paper, with the numbers that this report has for its columns.

    Attributes:
        number: the table's number in the paper.
        columns: names of the table's columns for which the report has a number.
        published: name of a row in the paper to (column to published value).
        measured: model label to (column to measured value, in the unit of the column).
    """

    number: int
    columns: tuple[str, ...]
    published: dict[str, dict[str, float]]
    measured: dict[str, dict[str, float]]


def published_tables(measurements: pd.DataFrame, *, paper: Any = the_paper) -> list[PublishedTable]:
    """Returns those of the paper's tables that have a published value in at least one column that was measured.

    Args:
        measurements: the tidy table: one row for each measured number.
        paper: a module with the columns and values of the paper; `sbeval.paper` by default.
    """
    tables = []
    columns = paper.measured_columns()
    for number in sorted({column.table for column in columns}):
        measured: dict[str, dict[str, float]] = {}
        of_table = [column for column in columns if column.table == number]
        for column in of_table:
            for model, value in _numbers(measurements, column).items():
                measured.setdefault(model, {})[column.column] = value
        named = [column.column for column in of_table]
        averaged = [name for name in named if name != _NOT_AVERAGED]
        for values in measured.values():
            if set(averaged) <= values.keys():
                values[_AVERAGE] = sum(values[name] for name in averaged) / len(averaged)
        known = {name for values in measured.values() for name in values}
        order = [name for name in [*named, _AVERAGE] if name in known]
        published: dict[str, dict[str, float]] = {}
        for value in paper.published_values():
            if value.table == number and value.column in known:
                published.setdefault(value.row, {})[value.column] = value.value
        order = [name for name in order if any(name in values for values in published.values())]
        if published:
            tables.append(PublishedTable(number=number, columns=tuple(order), published=published, measured=measured))
    return tables


def _numbers(measurements: pd.DataFrame, column: Any) -> dict[str, float]:
    """Returns model label to the measured number for a column of the paper's tables, in the unit of the column.

    For a column over several tasks ("a+b") it is the mean of their numbers. Models that did not run all of them are
    left out.
    """
    if len(tasks := column.task.split("+")) > 1:
        each = [_numbers(measurements, column._replace(task=task)) for task in tasks]
        both = set.intersection(*(set(numbers) for numbers in each))
        return {model: sum(numbers[model] for numbers in each) / len(each) for model in each[0] if model in both}
    parsed = parse_metric_key(column.metric)
    metric, length = parsed if parsed is not None else (column.metric, None)
    rows = measurements[(measurements["task"] == column.task) & (measurements["metric"] == metric)]
    lengths = rows["context_length_tokens"]
    rows = rows[lengths.isna() if length is None else (lengths == length).fillna(False)]
    rows = rows[rows["filter"].fillna("none") == column.filter]
    if column.shots is not None:
        rows = rows[(rows["few_shot"] == column.shots).fillna(False)]
    numbers: dict[str, float] = {}
    for number in records(rows):  # newest first, if a task was run with several values of max_length
        numbers.setdefault(number["setting"], float(number["value"]) * column.scale)
    return numbers


def _section(material: Material) -> Section | None:
    """Builds the section "Tables"; None if there is no table to show."""
    measurements = material.results.measurements
    ordinary = suite_rows(material.results)
    labels = [model.label for model in material.results.models]
    tables = [_ordinary_table(ordinary, labels, material.baseline)] if ordinary else []
    tables += [_published_table(published, labels) for published in published_tables(measurements)]
    elsewhere = measurements["metric"].isin(["score", THINKING_CUT])
    ruler = measurements[(measurements["family"] == "ruler") & ~elsewhere]
    recall = measurements[measurements["family"] == "recall"]
    beside = pd.concat([ruler, recall[[not is_drawn(metric) for metric in recall["metric"]]]])
    tables += [_beside_table(task, beside[beside["task"] == task], labels) for task in dict.fromkeys(beside["task"])]
    if not tables:
        return None
    lead = f"Best in bold; differences are to {material.baseline}." if ordinary and len(labels) > 1 else ""
    return Section(identifier="tables", title="Tables", lead=lead, tables=tuple(tables))


TABLES = Kind(section=_section)


def _ordinary_table(ordinary: Sequence[SuiteRow], labels: Sequence[str], baseline: str) -> Table:
    shown_labels = [label for label in labels if any(label in task.cells for task in ordinary)]
    return Table.of(
        ("task", *[Cell(name=label) for label in shown_labels]),
        [(task.name, *(_ordinary_cell(task, label, baseline) for label in shown_labels)) for task in ordinary],
        stem="tasks",
        caption="Ordinary tasks",
        explanation=(
            "Small print: standard error, and the difference to the baseline with its 95% interval. It is paired over "
            "the same questions where both runs logged their samples; where marked unpaired, the runs are taken as "
            "independent, which makes the interval wider."
        ),
    )


def _ordinary_cell(task: SuiteRow, label: str, baseline: str) -> Cell:
    if label not in task.cells:
        return NOT_MEASURED
    cell = task.cells[label]
    small = [] if math.isnan(cell.stderr) else [f"± {cell.stderr:.4f}"]
    if (difference := task.difference(label, baseline)) is not None:
        unpaired = "" if difference.samples else " unpaired"
        small.append(f"{with_interval(difference.estimate, difference.low, difference.high)}{unpaired}")
    return Cell(
        f"{cell.value:.4f}" if abs(cell.value) < 10 else f"{cell.value:,.2f}",
        bold=label in task.best,
        small=tuple(small),
        in_files=f"{cell.value:.4f}",
    )


def _published_table(published: PublishedTable, labels: Sequence[str]) -> Table:
    rows = [(Cell(f"paper: {name}"), values) for name, values in published.published.items()]
    rows += [(Cell(name=label), published.measured[label]) for label in labels if label in published.measured]
    tops = {}
    for column in published.columns:
        best = min if column.lower().startswith("wikitext") else max
        tops[column] = best(values[column] for _, values in rows if column in values)

    def cell(values: Mapping[str, float], column: str) -> Cell:
        known = column in values
        return Cell(f"{values[column]:.1f}", bold=values[column] == tops[column]) if known else NOT_MEASURED

    return Table.of(
        ("model", *published.columns),
        [(heading, *(cell(values, column) for column in tops)) for heading, values in rows],
        stem=f"paper-table-{published.number}",
        caption=f"The paper's Table {published.number}",
        explanation="Published values and this report's, in the paper's units; best in bold.",
    )


def _beside_table(task: str, measured: pd.DataFrame, labels: Sequence[str]) -> Table:
    values: dict[tuple[str, str], dict[int, str]] = {}
    for number in records(measured.fillna({LENGTH: 0})):
        cells = values.setdefault((number["setting"], number["metric"]), {})
        cells[int(number[LENGTH])] = f"{number['value']:.4g}"
    measures = "Other measures than the share of answers found, such as teacher-forced ones"
    names = itertools.product(labels, dict.fromkeys(measured["metric"]))
    return Table.by_length(
        [(Cell(f" {name[1]}", name=name[0]), values[name]) for name in names if name in values],
        lengths=column_values(measured) or [0],
        heading="model and metric",
        column_name=lambda length: f"{length:,}" if length else "value",
        stem=f"beside-{safe_stem(task)}",
        caption=f"Beside the score: {task}",
        explanation=f"{measures}; each column is one length.",
    )


def _by_length(material: Material) -> Section | None:
    """Builds the section "Ordinary tasks by input length"; None if no task was run at several lengths."""
    ordinary = suite_rows(material.results)
    limited = [task for task in ordinary if any(task.limit)]
    groups = grouped(((task.task, task.metric, task.filter_name), task) for task in limited)
    looks = material.looks_of(label for task in ordinary for label in task.cells)
    figures: list[Figure] = []
    drawn_labels: set[str] = set()
    for names, rows in groups.items():
        table, by_text = input_table(rows)
        if table["context_length_tokens"].nunique() < 2:
            continue
        drawn_labels |= set(table["setting"])
        title = display_name(", ".join(name for name in names if name != "none"))
        length_words = "text length" if by_text else "longest input, max_length"
        finding = listed([_ends(label, table) for label in looks if (table["setting"] == label).any()])
        caption = Caption(title=title, finding=finding, subtitle=f"against {length_words}")
        shares = bool(table["value"].between(0, 1).all())
        spec = length_figure(
            table,
            caption,
            looks=looks,
            number_format=".4f",
            tooltip=_TOOLTIP,
            x_title=f"{length_words} (tokens, log scale)",
            y_title="score" if shares else "value",
            **(SHARES if shares else {}),
        )
        folded = len(figures) >= _SHOWN
        figures.append(material.figure({"score": spec}, f"inputs-{safe_stem(title)}", caption, folded=folded))
    if not figures:
        return None
    return Section(
        identifier="inputs",
        title="Ordinary tasks by input length",
        lead=(
            "Tasks that a model ran at several values of max_length, or on texts of several lengths. A task whose "
            "inputs are shorter than max_length does not change with it. Bands: 95% intervals, Wilson's for scores "
            "between 0 and 1, else 1.96 standard errors; a score of 0 or 1 without its number of samples has none."
        ),
        figures=tuple(figures),
        legend={label: look for label, look in looks.items() if label in drawn_labels},
    )


INPUTS = Kind(section=_by_length)


def input_table(rows: Sequence[SuiteRow]) -> tuple[pd.DataFrame, bool]:
    """Returns a table of an ordinary task's values by model and length, and whether the lengths are text lengths.

    Lengths are text lengths if the task has texts of given lengths (`max_seq_lengths`), and otherwise the values of
    `max_length` of the runs. If texts of one length were run with several values of `max_length`, the run with the
    largest is used.
    """
    by_text = any(task.limit.text_length_tokens is not None for task in rows)
    numbers: dict[tuple[str, int], list[object]] = {}
    for task in sorted(rows, key=lambda task: task.limit.max_length_tokens or 0):
        length = task.limit.text_length_tokens if by_text else task.limit.max_length_tokens
        if not length:  # a length of zero ("0k") has no place on a logarithmic axis
            continue
        shares = all(0 <= cell.value <= 1 for cell in task.cells.values())
        for label, cell in task.cells.items():
            low, high = cell.value - 1.96 * cell.stderr, cell.value + 1.96 * cell.stderr
            if shares:
                low, high = map(float, score_interval(cell.value, cell.stderr, cell.samples))
            numbers[label, length] = [label, length, cell.value, low, high]
    table = pd.DataFrame(list(numbers.values()), columns=_COLUMNS)
    return table.sort_values(["setting", "context_length_tokens"], kind="stable").reset_index(drop=True), by_text


def _ends(label: str, table: pd.DataFrame) -> str:
    values = by_length(table, label)
    ends = [f"{values[length]:.3f} at {length_text(length)}" for length in dict.fromkeys((min(values), max(values)))]
    return f"{quote_name(label)} {' and '.join(ends)}"
