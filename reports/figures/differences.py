"""Paired differences of a model's NLL to its own training length, against context length, with their band."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.reports.analyse.claims import LengthClaims
from sbeval.reports.figures.curves import training_marks
from sbeval.reports.figures.labels import SYMLOG_CONSTANT
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.fields import length_text
from sbeval.results.digits import change_text

_TOOLTIP = {
    "setting": "model",
    "length_text": "context",
    "value_text": "difference (nats per token)",
    "interval_text": "simultaneous 95% band",
    "clusters_text": "documents",
}
_UNEQUAL = 8.0
"""Largest differences of two models whose ratio is above this share no linear axis: the smaller would be flat."""
_SYMLOG_TICKS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


def difference_figure(
    claims: Mapping[str, LengthClaims],
    *,
    looks: Mapping[str, Look],
    training_lengths: Mapping[str, int],
    title: str,
    subtitle: str,
    description: str,
) -> dict[str, Any]:
    """Returns the Vega-Lite specification.

    Args:
        claims: model to its differences; each is drawn with a point of zero at its reference.
        looks: how to draw each model.
        training_lengths: model to its training length in tokens, where known.
        title: heading of the image files.
        subtitle: second line of the image files.
        description: the finding in words, for readers who cannot see the figure.
    """
    order = [label for label in looks if label in claims]
    rows = [row for label in order for row in _rows(label, claims[label])]
    lengths = [row["x"] for row in rows]
    scale = _y_scale(rows, order)
    return line_figure(
        rows,
        axes=Axes(
            x_title="context length (tokens, log scale)",
            x_domain=(min(lengths), max(lengths)),
            y_title=f"difference in NLL (nats per token{', stretched near 0' if scale else ''})",
            levels={0.0: ""},
            **scale,
        ),
        looks={label: looks[label] for label in order},
        marks=training_marks(training_lengths, order),
        tooltip=_TOOLTIP,
        title=title,
        subtitle=subtitle,
        description=description,
    )


def _rows(label: str, claim: LengthClaims) -> list[dict[str, Any]]:
    reference = claim.reference_tokens or 0
    shared = {"setting": label, "clusters_text": f"{claim.clusters:,}"}
    zero = {"x": reference, "y": 0.0, "value_text": "0, the length compared with", "interval_text": "none"}
    rows: list[dict[str, Any]] = [zero | {"low": 0.0, "high": 0.0}]
    for item in claim.differences:
        measured = not math.isnan(item.low)
        text, low, high = change_text(item.estimate, item.low, item.high)
        rows.append(
            {
                "x": item.context_length_tokens,
                "y": item.estimate,
                "low": item.low if measured else None,
                "high": item.high if measured else None,
                "value_text": text,
                "interval_text": f"{low} to {high}" if measured else "none: too few documents",
            }
        )
    if not any(row["low"] for row in rows):
        rows[0] |= {"low": None, "high": None}
    every = [shared | row | {"length_text": f"{row['x']:,} tokens, against {length_text(reference)}"} for row in rows]
    return sorted(every, key=lambda row: row["x"])


def _y_scale(rows: Sequence[Mapping[str, Any]], order: Sequence[str]) -> dict[str, Any]:
    """Returns the axis of a scale that is logarithmic away from zero, where one model's differences dwarf another's."""
    largest = [max(abs(row["y"]) for row in rows if row["setting"] == label) for label in order]
    if max(largest) < _UNEQUAL * max(min(largest), SYMLOG_CONSTANT):
        return {}
    values = [row[key] for row in rows for key in ("y", "low", "high") if row[key] is not None]
    low, high = 1.15 * min(values), 1.15 * max(values)
    ticks = tuple(
        tick for tick in (*(-tick for tick in reversed(_SYMLOG_TICKS)), 0.0, *_SYMLOG_TICKS) if low <= tick <= high
    )
    return {"y_scale": "symlog", "y_domain": (low, high), "y_values": ticks, "y_format": "~g"}
