"""What attention does with its weight as the context grows: small multiples, all models on the same axes."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from sbeval.reports.figures.curves import length_domain, length_rows, training_marks
from sbeval.reports.figures.lines import Axes
from sbeval.reports.figures.small_multiples import Panel, small_multiples
from sbeval.reports.figures.theme import Look

MEASURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "span50": ("keys that hold half the weight", ",.1f", {"y_scale": "log", "y_format": "~s"}),
    "first_token": ("weight on the first token", ".3f", {"y_domain": (0.0, 1.0), "y_format": ".0%"}),
    "entropy": ("entropy of the weights (nats)", ".2f", {}),
    "remainder": ("remaining stick", ".3f", {"y_domain": (0.0, 1.0), "y_format": ".0%"}),
}
"""Column to its words, the format of its numbers and its axis."""
_TOOLTIP = {"setting": "model", "length_text": "context", "value_text": "mean over heads"}


def attention_figure(
    means: pd.DataFrame,
    *,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    title: str,
    description: str,
) -> dict[str, Any]:
    """Returns the Vega-Lite specification: one panel a measure, one line a model.

    Args:
        means: columns setting, context_length_tokens and those of `MEASURES`; NaN where nothing is known.
        looks: how to draw each model, in drawing order.
        training_lengths: model to its training length in tokens, where known.
        title: heading of the image files.
        description: the finding in words, for readers who cannot see the figure.
    """
    marks = training_marks(training_lengths, list(looks))
    domain = length_domain(means, marks)
    panels = []
    for column, (words, number_format, axis) in MEASURES.items():
        known = means.dropna(subset=[column])
        known = known.assign(value=known[column], ci95_low=float("nan"), ci95_high=float("nan"))
        if known.empty:
            continue
        options: dict[str, Any] = {"x_title": None, "x_octaves": 2, "x_domain": domain, "y_title": None, **axis}
        rows = length_rows(known, [label for label in looks if label in set(known["setting"])], number_format)
        panels.append(Panel(name=words, rows=rows, axes=Axes(**options)))
    return small_multiples(
        panels,
        columns=2,
        height=180,
        width=300,
        looks=looks,
        marks=marks,
        tooltip=_TOOLTIP,
        title=title,
        subtitle="mean over heads, by context length",
        description=description,
    )
