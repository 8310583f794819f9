"""NLL by position in one long window, and its difference to a baseline."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from sbeval.reports.figures.curves import count_text, training_marks
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import LARGEST_NATS
from sbeval.reports.read.results import records

_TOOLTIP = {
    "setting": "model",
    "range_text": "positions",
    "value_text": "value",
    "interval_text": "95% interval",
    "tokens_text": "scored tokens",
    "clusters_text": "documents",
}


def position_figure(
    table: pd.DataFrame,
    *,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    title: str,
    subtitle: str,
    description: str,
    perplexity: bool = False,
    difference: bool = False,
) -> dict[str, Any]:
    """Returns the Vega-Lite specification of NLL against position.

    Args:
        table: columns setting, first, last, nll, ci95_low, ci95_high, tokens, clusters; one row a bin of positions.
        looks: how to draw each model.
        training_lengths: model to its training length in tokens, where known.
        title: heading of the image files.
        subtitle: second line of the image files.
        description: the finding in words, for readers who cannot see the figure.
        perplexity: True to draw exp(NLL) on a log axis.
        difference: True where `nll` holds differences to a baseline.
    """
    order = [label for label in looks if label in set(table["setting"])]
    rows = [_row(row, perplexity, end_digits=".3f" if difference else ",.2f") for row in records(table)]
    positions = [row["x"] for row in rows]
    words = "perplexity per token (log scale)" if perplexity else "NLL (nats per token)"
    quantity = "difference in NLL (nats per token)" if difference else words
    return line_figure(
        sorted(rows, key=lambda row: (order.index(row["setting"]), row["x"])),
        axes=Axes(
            x_title="position in the window (tokens, log scale)",
            x_domain=(max(1, math.floor(min(positions))), math.ceil(max(positions))),
            y_title=quantity,
            y_scale="log" if perplexity else "linear",
            y_format="~g" if perplexity else None,
            levels={0.0: ""} if difference else {},
        ),
        looks={label: looks[label] for label in order},
        marks=training_marks(training_lengths, order),
        tooltip=_TOOLTIP | {"value_text": quantity.removesuffix(" (log scale)")},
        title=title,
        subtitle=subtitle,
        description=description,
    )


def _row(row: Mapping[str, Any], perplexity: bool, *, end_digits: str) -> dict[str, Any]:
    first, last = float(row["first"]), float(row["last"])
    measured = math.isfinite(row["ci95_low"])
    value, low, high = (
        math.exp(min(row[key], LARGEST_NATS)) if perplexity else float(row[key])
        for key in ("nll", "ci95_low", "ci95_high")
    )
    return {
        "setting": row["setting"],
        "x": math.sqrt(max(1.0, first) * max(1.0, last)),
        "y": value,
        "range_text": f"{int(first):,} to {int(last):,}",
        "low": low if measured else None,
        "high": high if measured else None,
        "value_text": format(value, ",.2f" if perplexity else ".3f"),
        "interval_text": f"{low:{end_digits}} to {high:{end_digits}}" if measured else "none",
        "tokens_text": f"{int(row['tokens']):,}",
        "clusters_text": count_text(row["clusters"]),
    }
