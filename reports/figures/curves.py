"""Numbers against context length: one line a model, a band, a mark at each training length."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.figures.labels import Caption
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.results import by_model

METRIC_WORDS = {"nll": "NLL", "token_perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}
SCORE_TOOLTIP = {"setting": "model", "length_text": "context", "value_text": "score", "interval_text": "95% interval"}
SHARES: dict[str, Any] = {"y_domain": (0.0, 1.0), "y_format": ".0%"}
"""The axis of what lies between nothing and all."""


def length_figure(
    table: pd.DataFrame,
    caption: Caption,
    *,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    number_format: str,
    tooltip: Mapping[str, str],
    x_title: str = "context length (tokens, log scale)",
    **y_axis: Any,
) -> dict[str, Any]:
    """Returns the Vega-Lite specification of numbers against context length.

    The table has columns setting, context_length_tokens, value, ci95_low, ci95_high and, where known, tokens and
    clusters; models that are not in it are left out. `y_axis` holds fields of `Axes` for the measured quantity.
    """
    shown = set(table["setting"])
    looks = {label: look for label, look in looks.items() if label in shown}
    marks = training_marks(training_lengths, looks)
    rows = length_rows(table, list(looks), number_format)
    return line_figure(
        rows,
        caption,
        axes=Axes(x_title=x_title, x_domain=length_domain(table, marks), **y_axis),
        looks=looks,
        marks=marks,
        tooltip=with_seeds(tooltip, rows),
    )


def score_figure(
    table: pd.DataFrame, caption: Caption, *, looks: Mapping[str, Look], training_lengths: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the `length_figure` of a score, its axis fixed to 0..1."""
    return length_figure(
        table,
        caption,
        looks=looks,
        training_lengths=training_lengths,
        number_format=".3f",
        tooltip=SCORE_TOOLTIP,
        y_title="score",
        **SHARES,
    )


def with_seeds(tooltip: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the tooltip's fields, with the spread over seeds only where a line stands for several."""
    return {**tooltip, **({"seeds_text": "seeds"} if any(row.get("seed_low") is not None for row in rows) else {})}


def training_marks(training_lengths: Mapping[str, int], order: Iterable[str]) -> dict[int, str]:
    """Returns the vertical marks of the models shown: training length to its text."""
    lengths = sorted({training_lengths[label] for label in order if label in training_lengths})
    return {length: f"trained at {length_text(length)}" for length in lengths}


def length_domain(table: pd.DataFrame, marks: Iterable[int]) -> tuple[int, int]:
    """Returns the ends of the length axis: those of the measurements, and marks up to a doubling beyond them."""
    lengths = [int(length) for length in table["context_length_tokens"].dropna()]
    low, high = min(lengths), max(lengths)
    near = [mark for mark in marks if low <= 2 * mark and mark <= 2 * high]
    low, high = min([low, *near]), max([high, *near])
    return (low, high) if low < high else (max(1, low // 2), 2 * high)


def length_rows(
    table: pd.DataFrame, order: Sequence[str], number_format: str, column: str = "context_length_tokens"
) -> list[dict[str, Any]]:
    """Returns one row a model and length, or count of another column, with its number as text.

    A length that only others have becomes a None, so that the line breaks there. Columns tokens and clusters may be
    missing.
    """
    every_length = sorted(int(length) for length in table[column].dropna().unique())
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
    return {
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
        **_seeds(number, number_format),
    }


def _seeds(number: Mapping[str, Any], number_format: str) -> dict[str, Any]:
    count = number.get("seeds", math.nan)
    if math.isnan(count) or count < 2:
        return {}
    low, high = float(number["seed_low"]), float(number["seed_high"])
    words = f"{int(count)}, from {low:{number_format}} to {high:{number_format}}"
    return {"seed_low": low, "seed_high": high, "seeds_text": words}


def count_text(value: float) -> str:
    """Writes a count, or that there is none."""
    return "not recorded" if math.isnan(value) else f"{int(value):,}"
