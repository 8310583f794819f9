"""A score between 0 and 1 against context length or number of pairs."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from sbeval.reports.figures.curves import length_domain, length_rows, training_marks
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import Look

_TOOLTIP = {"setting": "model", "length_text": "context", "value_text": "score", "interval_text": "95% interval"}


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
        _rows(table, order),
        axes=Axes(
            x_title="context length (tokens, log scale)",
            x_domain=length_domain(table, marks),
            y_title="score",
            y_domain=(0.0, 1.0),
            y_format=".0%",
        ),
        looks={label: looks[label] for label in order},
        marks=marks,
        tooltip=_TOOLTIP,
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
    parts = []
    for index, (name, table) in enumerate(tables.items()):
        spec = line_figure(
            _rows(table, [label for label in order if label in set(table["setting"])]),
            axes=Axes(
                x_title=None,
                x_octaves=3,
                x_domain=length_domain(everything, marks),
                y_title=None,
                y_domain=(0.0, 1.0),
                y_format=".0%",
            ),
            looks={label: looks[label] for label in order},
            marks={length: "" for length in marks},
            tooltip=_TOOLTIP,
            title=name,
            subtitle="",
            description=name,
            height=130,
            width=200,
            direct_labels=False,
            hover=f"hover{index}",
            every_look=True,
        )
        kept = {key: value for key, value in spec.items() if key in ("width", "height", "data", "layer")}
        parts.append({"title": {"text": name, "fontSize": 12, "offset": 6}, **kept})
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {"text": title, "subtitle": subtitle},
        "description": description,
        "padding": 6,
        "columns": columns,
        "spacing": {"row": 22, "column": 26},
        "params": [{"name": "hidden", "value": []}],
        "concat": parts,
        "resolve": {"legend": {"color": "shared"}, "scale": {"color": "shared", "shape": "shared"}},
    }


def _rows(table: pd.DataFrame, order: list[str]) -> list[dict[str, Any]]:
    return length_rows(table.assign(tokens=float("nan"), clusters=float("nan")), order, ".3f")
