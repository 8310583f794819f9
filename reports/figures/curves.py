"""A metric or a score against context length: one line a model, a band, a mark at each training length."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.small_multiples import Panel, small_multiples
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.results import by_model

METRICS = {
    "nll": ("NLL (nats per token)", "linear", ".3f"),
    "token_perplexity": ("perplexity per token (log scale)", "log", ",.2f"),
    "bits_per_byte": ("bits per byte", "linear", ".3f"),
}
"""A metric's axis, its scale and the digits of its numbers."""
METRIC_WORDS = {"nll": "NLL", "token_perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}
_TOOLTIP = {
    "setting": "model",
    "length_text": "context",
    "value_text": "value",
    "interval_text": "95% interval",
    "tokens_text": "scored tokens",
    "clusters_text": "documents",
}
_SCORE_TOOLTIP = {"setting": "model", "length_text": "context", "value_text": "score", "interval_text": "95% interval"}


def curve_figure(
    table: pd.DataFrame,
    *,
    metric: str,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    title: str,
    subtitle: str,
    description: str,
) -> dict[str, Any]:
    """Returns the Vega-Lite specification of one panel.

    Args:
        table: rows of one metric with columns setting, context_length_tokens, value, ci95_low, ci95_high, tokens,
            clusters.
        metric: key of `METRICS`.
        looks: how to draw each model.
        training_lengths: model to its training length in tokens, where known.
        title: heading of the image files.
        subtitle: second line of the image files.
        description: the finding in words, for readers who cannot see the figure.
    """
    axis_title, scale, number_format = METRICS[metric]
    shown = set(table["setting"])
    order = [label for label in looks if label in shown]
    marks = training_marks(training_lengths, order)
    rows = length_rows(table, order, number_format)
    return line_figure(
        rows,
        axes=Axes(
            x_title="context length (tokens, log scale)",
            x_domain=length_domain(table, marks),
            y_title=axis_title,
            y_scale=scale,
            y_format="~g" if scale == "log" else None,
        ),
        looks={label: looks[label] for label in order},
        marks=marks,
        tooltip=curve_tooltip(rows) | {"value_text": axis_title.removesuffix(" (log scale)")},
        title=title,
        subtitle=subtitle,
        description=description,
    )


def score_figure(
    table: pd.DataFrame,
    *,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    title: str,
    subtitle: str,
    description: str,
) -> dict[str, Any]:
    """Returns the Vega-Lite specification of a score, its axis fixed to 0..1.

    Args:
        table: columns setting, context_length_tokens, value, ci95_low, ci95_high.
        looks: how to draw each model.
        training_lengths: model to its training length in tokens, where known.
        title: heading of the image files.
        subtitle: second line of the image files.
        description: the finding in words, for readers who cannot see the figure.
    """
    order = [label for label in looks if label in set(table["setting"])]
    marks = training_marks(training_lengths, order)
    return line_figure(
        length_rows(table, order, ".3f"),
        axes=Axes(
            x_title="context length (tokens, log scale)",
            x_domain=length_domain(table, marks),
            y_title="score",
            y_domain=(0.0, 1.0),
            y_format=".0%",
        ),
        looks={label: looks[label] for label in order},
        marks=marks,
        tooltip=_SCORE_TOOLTIP,
        title=title,
        subtitle=subtitle,
        description=description,
    )


def score_grid(
    tables: Mapping[str, pd.DataFrame],
    *,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    title: str,
    subtitle: str,
    description: str,
    columns: int = 4,
) -> dict[str, Any]:
    """Returns small multiples of `score_figure`, one for each name in `tables`, on the same axes."""
    everything = pd.concat(list(tables.values()), ignore_index=True)
    shown = set(everything["setting"])
    order = [label for label in looks if label in shown]
    marks = training_marks(training_lengths, order)
    axes = Axes(
        x_title=None,
        x_octaves=3,
        x_domain=length_domain(everything, marks),
        y_title=None,
        y_domain=(0.0, 1.0),
        y_format=".0%",
    )
    panels = []
    for name, table in tables.items():
        rows = length_rows(table, [label for label in order if label in set(table["setting"])], ".3f")
        panels.append(Panel(name=name, rows=rows, axes=axes))
    return small_multiples(
        panels,
        columns=columns,
        height=130,
        width=200,
        looks={label: looks[label] for label in order},
        marks=marks,
        tooltip=_SCORE_TOOLTIP,
        title=title,
        subtitle=subtitle,
        description=description,
    )


def curve_tooltip(rows: Sequence[Mapping[str, Any]], base: Mapping[str, str] = _TOOLTIP) -> dict[str, str]:
    """Returns the tooltip's fields; the spread over seeds only where a line stands for several."""
    return {**base, **({"seeds_text": "seeds"} if any(row.get("seed_low") is not None for row in rows) else {})}


def training_marks(training_lengths: Mapping[str, int], order: Sequence[str]) -> dict[int, str]:
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
    measured = by_model(table)
    for label in order:
        own = {int(row[column]): row for row in measured[label]}
        first, last = min(own), max(own)
        for length in every_length:
            if length in own:
                rows.append(_row(label, length, own[length], number_format))
            elif first < length < last:
                rows.append({"setting": label, "x": length, "y": None, "low": None, "high": None})
    return rows


def _row(label: str, length: int, found: Mapping[str, Any], number_format: str) -> dict[str, Any]:
    low, high = float(found["ci95_low"]), float(found["ci95_high"])
    measured = not math.isnan(low)
    return {
        "setting": label,
        "x": length,
        "y": float(found["value"]),
        "low": low if measured else None,
        "high": high if measured else None,
        "length_text": f"{length:,} tokens",
        "value_text": format(found["value"], number_format),
        "interval_text": f"{low:{number_format}} to {high:{number_format}}" if measured else "none",
        "tokens_text": count_text(found.get("tokens", math.nan)),
        "clusters_text": count_text(found.get("clusters", math.nan)),
        **_seeds(found, number_format),
    }


def _seeds(found: Mapping[str, Any], number_format: str) -> dict[str, Any]:
    count = found.get("seeds", math.nan)
    if math.isnan(count) or count < 2:
        return {}
    low, high = float(found["seed_low"]), float(found["seed_high"])
    words = f"{int(count)}, from {low:{number_format}} to {high:{number_format}}"
    return {"seed_low": low, "seed_high": high, "seeds_text": words}


def count_text(value: float) -> str:
    """Writes a count, or that there is none."""
    return "not recorded" if math.isnan(value) else f"{int(value):,}"
