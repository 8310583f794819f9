"""Ordinary tasks run at several input lengths, such as BABILong: their scores against that length."""

from collections.abc import Sequence

import pandas as pd

from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.analyse.ruler import by_length
from sbeval.reports.analyse.statistics import score_interval
from sbeval.reports.analyse.suite import SuiteRow, suite_rows
from sbeval.reports.figures.curves import SHARES, length_figure
from sbeval.reports.figures.labels import Caption
from sbeval.reports.read.fields import in_words, length_text
from sbeval.reports.section import Figure, Kind, Material, Section, listed

_SHOWN = 4
_TOOLTIP = {"setting": "model", "length_text": "input", "value_text": "value", "interval_text": "95% interval"}
_COLUMNS = ["setting", "context_length_tokens", "value", "ci95_low", "ci95_high"]


def _section(material: Material) -> Section | None:
    """Returns None where no task was run at several lengths."""
    ordinary = suite_rows(material.results)
    groups: dict[tuple[str, str, str], list[SuiteRow]] = {}
    for row in ordinary:
        if any(row.limit):
            groups.setdefault((row.task, row.metric, row.filter_name), []).append(row)
    looks = material.looks_of(label for row in ordinary for label in row.cells)
    figures: list[Figure] = []
    shown: set[str] = set()
    for names, rows in groups.items():
        table, by_text = input_table(rows)
        if table["context_length_tokens"].nunique() < 2:
            continue
        shown |= set(table["setting"])
        title = ", ".join(name for name in names if name != "none")
        length_words = "text length" if by_text else "longest input, max_length"
        finding = listed([_ends(label, table) for label in looks if (table["setting"] == label).any()])
        caption = Caption(title=title, finding=finding, subtitle=f"against {length_words}")
        shares = bool(table["value"].between(0, 1).all())
        spec = length_figure(
            table,
            caption,
            looks=looks,
            training_lengths=material.training_lengths,
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
        legend={label: look for label, look in looks.items() if label in shown},
    )


INPUTS = Kind(section=_section)


def input_table(rows: Sequence[SuiteRow]) -> tuple[pd.DataFrame, bool]:
    """Returns one row a model and length, and whether the length is the texts' rather than `max_length`.

    Of several values of `max_length` on texts of one length the largest counts.
    """
    by_text = any(row.limit.text_length_tokens is not None for row in rows)
    numbers: dict[tuple[str, int], list[object]] = {}
    for row in sorted(rows, key=lambda row: row.limit.max_length_tokens or 0):
        length = row.limit.text_length_tokens if by_text else row.limit.max_length_tokens
        if not length:  # texts of no length ("0k") have no place on a logarithmic axis
            continue
        shares = all(0 <= cell.value <= 1 for cell in row.cells.values())
        for label, cell in row.cells.items():
            low, high = cell.value - 1.96 * cell.stderr, cell.value + 1.96 * cell.stderr
            if shares:
                low, high = map(float, score_interval(cell.value, cell.stderr, cell.samples))
            numbers[label, length] = [label, length, cell.value, low, high]
    table = pd.DataFrame(list(numbers.values()), columns=_COLUMNS)
    return table.sort_values(["setting", "context_length_tokens"], kind="stable").reset_index(drop=True), by_text


def _ends(label: str, table: pd.DataFrame) -> str:
    values = by_length(table, label)
    ends = [f"{values[length]:.3f} at {length_text(length)}" for length in dict.fromkeys((min(values), max(values)))]
    return f"{in_words(label)} {' and '.join(ends)}"
