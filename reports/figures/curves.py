"""A metric against context length: one line a model, a band, a mark at each training length."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.models import length_text
from sbeval.reports.read.results import by_setting

DEFAULT_LONGEST_TOKENS = 131_072
METRICS = {
    "nll": ("NLL (nats per token)", "linear", ".4f"),
    "token_perplexity": ("perplexity per token (log scale)", "log", ",.3f"),
    "bits_per_byte": ("bits per byte", "linear", ".4f"),
}
_TOOLTIP = {
    "setting": "model",
    "length_text": "context",
    "value_text": "value",
    "interval_text": "95% interval",
    "tokens_text": "scored tokens",
    "clusters_text": "documents",
}


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


def curve_tooltip(rows: Sequence[Mapping[str, Any]], base: Mapping[str, str] = _TOOLTIP) -> dict[str, str]:
    """Returns the tooltip's fields; the spread over seeds only where a line stands for several."""
    return {**base, **({"seeds_text": "seeds"} if any(row.get("seed_low") is not None for row in rows) else {})}


def training_marks(training_lengths: Mapping[str, int], order: Sequence[str]) -> dict[int, str]:
    """Returns the vertical marks of the models shown: training length to its text."""
    lengths = sorted({training_lengths[label] for label in order if label in training_lengths})
    return {length: f"trained at {length_text(length)}" for length in lengths}


def length_domain(table: pd.DataFrame, marks: Mapping[int, str]) -> tuple[int, int]:
    """Returns the ends of the length axis; it goes to 128K, or as far as the measurements."""
    lengths = [int(length) for length in table["context_length_tokens"].dropna()]
    return min([*lengths, *marks]), max([*lengths, *marks, DEFAULT_LONGEST_TOKENS])


def length_rows(table: pd.DataFrame, order: Sequence[str], number_format: str) -> list[dict[str, Any]]:
    """One row a model and length; a length that only others have becomes a None, so that the line breaks there."""
    every_length = sorted(int(length) for length in table["context_length_tokens"].dropna().unique())
    rows: list[dict[str, Any]] = []
    measured = by_setting(table)
    for label in order:
        own = {int(row["context_length_tokens"]): row for row in measured[label]}
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
        "tokens_text": count_text(found["tokens"]),
        "clusters_text": count_text(found["clusters"]),
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
