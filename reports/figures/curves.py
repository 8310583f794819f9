"""Numbers against context length: one line a model, a band, a mark at each training length."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.figures.labels import Caption, Row
from sbeval.reports.figures.lines import Axes, line_figure, training_marks
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.results import LENGTH, by_model, column_values

METRIC_WORDS = {"nll": "NLL", "token_perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}
COUNTED = {"tokens_text": "scored tokens", "clusters_text": "documents"}
"""A tooltip's counts behind a number."""
SCORE_TOOLTIP = {"setting": "model", "length_text": "context", "value_text": "score", "interval_text": "95% interval"}
SHARES: dict[str, Any] = {"y_domain": (0.0, 1.0), "y_format": ".0%"}
"""The axis of what lies between nothing and all."""


def length_figure(
    table: pd.DataFrame,
    caption: Caption,
    *,
    looks: Mapping[str, Look],
    number_format: str,
    tooltip: Mapping[str, str],
    x_title: str = "context length (tokens, log scale)",
    **y_axis: Any,
) -> dict[str, Any]:
    """Returns the Vega-Lite specification of numbers against context length.

    The table has columns setting, context_length_tokens, value, ci95_low, ci95_high and, where known, tokens and
    clusters; models that are not in it are left out. `y_axis` holds fields of `Axes` for the measured quantity.
    """
    rows = length_rows(table, looks, number_format)
    axes = Axes(x_title=x_title, x_domain=length_domain(table, looks), **y_axis)
    return line_figure(rows, caption, axes=axes, looks=looks, tooltip=with_seeds(tooltip, rows))


def with_seeds(tooltip: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the tooltip's fields, with the spread over seeds only where a line stands for several."""
    return {**tooltip, **({"seeds_text": "seeds"} if any(row.get("seed_low") is not None for row in rows) else {})}


def length_domain(table: pd.DataFrame, looks: Mapping[str, Look]) -> tuple[int, int]:
    """Returns the ends of the length axis: those of the measurements, and marks up to a doubling beyond them."""
    lengths = column_values(table)
    low, high = lengths[0], lengths[-1]
    near = [mark for mark in training_marks(looks, table["setting"]) if low <= 2 * mark <= 4 * high]
    low, high = min([low, *near]), max([high, *near])
    return (low, high) if low < high else (max(1, low // 2), 2 * high)


def length_rows(table: pd.DataFrame, order: Iterable[str], number_format: str, column: str = LENGTH) -> list[Row]:
    """Returns one row a model and length, or count of another column, with its number as text.

    A length that only others have becomes a None, so that the line breaks there. Columns tokens and clusters may be
    missing.
    """
    every_length = column_values(table, column)
    rows: list[dict[str, Any]] = []
    rows_of = by_model(table)
    for label in (label for label in order if label in rows_of):
        measured = {int(row[column]): row for row in rows_of[label]}
        first, last = min(measured), max(measured)
        for length in every_length:
            if length in measured:
                rows.append(_row(label, length, measured[length], number_format))
            elif first < length < last:
                rows.append({"setting": label, "x": length, "y": None, "low": None, "high": None})
    return rows


def _row(label: str, length: int, number: Mapping[str, Any], number_format: str) -> dict[str, Any]:
    low, high = float(number["ci95_low"]), float(number["ci95_high"])
    measured = not math.isnan(low)
    row = {
        "setting": label,
        "x": length,
        "y": float(number["value"]),
        "low": low if measured else None,
        "high": high if measured else None,
        "length_text": f"{length:,} tokens",
        "value_text": format(number["value"], number_format),
        "interval_text": f"{low:{number_format}} to {high:{number_format}}" if measured else "none",
        "tokens_text": count_text(number.get("tokens", math.nan)),
        "clusters_text": count_text(number.get("clusters", math.nan)),
    }
    if (count := number.get("seeds", math.nan)) >= 2:
        row["seed_low"], row["seed_high"] = lowest, highest = float(number["seed_low"]), float(number["seed_high"])
        row["seeds_text"] = f"{int(count)}, from {lowest:{number_format}} to {highest:{number_format}}"
    return row


def count_text(value: float) -> str:
    """Writes a count, or that there is none."""
    return "not recorded" if math.isnan(value) else f"{int(value):,}"
