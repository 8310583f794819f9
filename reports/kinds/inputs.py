"""The section on ordinary tasks run at several input lengths, such as BABILong: their scores against that length."""

from collections.abc import Mapping, Sequence

import pandas as pd

from sbeval.reports.analyse.names import in_words
from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.ruler import by_length
from sbeval.reports.analyse.statistics import score_interval
from sbeval.reports.analyse.suite import SuiteRow, suite_rows
from sbeval.reports.figures.curves import length_domain, length_rows, training_marks
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import length_text
from sbeval.reports.section import Figure, Kind, Material, Section, listed

_SHOWN = 4
_TOOLTIP = {"setting": "model", "length_text": "input", "value_text": "value", "interval_text": "95% interval"}
_COLUMNS = ["setting", "context_length_tokens", "value", "ci95_low", "ci95_high"]


def inputs_section(material: Material) -> Section | None:
    """Builds the section from the rows of ordinary tasks, None where no task was run at several lengths."""
    groups: dict[tuple[str, str, str], list[SuiteRow]] = {}
    ordinary = suite_rows(material.results)
    for row in ordinary:
        if any(row.limit):
            groups.setdefault((row.task, row.metric, row.filter_name), []).append(row)
    looks = material.looks_of(label for row in ordinary for label in row.cells)
    figures: list[Figure] = []
    shown: set[str] = set()
    for (task, metric, chosen_filter), own in groups.items():
        table, by_text = input_table(own)
        if table["context_length_tokens"].nunique() < 2:
            continue
        shown |= set(table["setting"])
        name = ", ".join(part for part in (task, metric, chosen_filter) if part != "none")
        figures.append(_figure(material, looks, name, table, by_text=by_text, folded=len(figures) >= _SHOWN))
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
        legend={label: look for label, look in looks.items() if label in shown},
    )


def input_table(rows: Sequence[SuiteRow]) -> tuple[pd.DataFrame, bool]:
    """Returns one row a model and length, and whether the length is the texts' rather than `max_length`.

    Of several values of `max_length` on texts of one length the largest counts.
    """
    by_text = any(row.limit.text_length_tokens is not None for row in rows)
    found: dict[tuple[str, int], list[object]] = {}
    for row in sorted(rows, key=lambda row: row.limit.max_length_tokens or 0):
        length = row.limit.text_length_tokens if by_text else row.limit.max_length_tokens
        if not length:  # texts of no length ("0k") have no place on a logarithmic axis
            continue
        shares = all(0 <= cell.value <= 1 for cell in row.cells.values())
        for label, cell in row.cells.items():
            low, high = cell.value - 1.96 * cell.stderr, cell.value + 1.96 * cell.stderr
            if shares:
                low, high = map(float, score_interval(cell.value, cell.stderr, cell.samples))
            found[label, length] = [label, length, cell.value, low, high]
    table = pd.DataFrame(list(found.values()), columns=_COLUMNS)
    return table.sort_values(["setting", "context_length_tokens"], kind="stable").reset_index(drop=True), by_text


def _figure(
    material: Material, looks: Mapping[str, Look], title: str, table: pd.DataFrame, *, by_text: bool, folded: bool
) -> Figure:
    order = [label for label in looks if (table["setting"] == label).any()]
    marks = training_marks(material.training_lengths, order)
    shares = bool(table["value"].between(0, 1).all())
    parts = []
    for label in order:
        values = by_length(table, label)
        ends = [
            f"{values[length]:.3f} at {length_text(length)}" for length in dict.fromkeys((min(values), max(values)))
        ]
        parts.append(f"{in_words(label)} {' and '.join(ends)}")
    finding = listed(parts)
    length_words = "text length" if by_text else "longest input, max_length"
    spec = line_figure(
        length_rows(table, order, ".4f"),
        axes=Axes(
            x_title=f"{length_words} (tokens, log scale)",
            x_domain=length_domain(table, marks),
            y_title="score" if shares else "value",
            y_domain=(0.0, 1.0) if shares else None,
            y_format=".0%" if shares else None,
        ),
        looks={label: looks[label] for label in order},
        marks=marks,
        tooltip=_TOOLTIP,
        title=title,
        subtitle=f"against {length_words}",
        description=f"{title}. {finding}",
    )
    return material.figure({"score": spec}, f"inputs-{safe_stem(title)}", title=title, finding=finding, folded=folded)


KIND = Kind(section=inputs_section)
