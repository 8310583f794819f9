"""A metric against context length: one line a setting, a band, a mark at each training length."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.figures.theme import Look
from sbeval.reports.settings import length_text

DEFAULT_LONGEST_TOKENS = 131_072
HEIGHT_PIXELS = 330
WIDTH_PIXELS = 620
METRICS = {
    "nll": ("NLL (nats per token)", "linear", ".4f"),
    "token_perplexity": ("perplexity per token (log scale)", "log", ",.3f"),
    "bits_per_byte": ("bits per byte", "linear", ".4f"),
}
_LENGTH_LABEL = "datum.value >= 1048576 ? datum.value / 1048576 + 'M' : datum.value >= 1024 ? datum.value / 1024 + 'K' : datum.value"
_LABEL_HEIGHT_PIXELS = 15.0
_DIRECT_LABELS_AT_MOST = 8


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
        looks: how to draw each setting.
        training_lengths: setting to its training length in tokens, where known.
        title: heading of the image files.
        subtitle: second line of the image files.
        description: the finding in words, for readers who cannot see the figure.
    """
    axis_title, scale_type, number_format = METRICS[metric]
    order = [label for label in looks if label in set(table["setting"])]
    shortest, longest = _length_domain(table, training_lengths)
    rows = _rows_with_gaps(table, order, number_format)
    ends = _end_labels(rows, order, scale_type)
    direct = len(order) <= _DIRECT_LABELS_AT_MOST
    color = {
        "field": "setting",
        "type": "nominal",
        "scale": {"domain": order, "range": [looks[label].light for label in order]},
        "legend": None if direct else {"title": None, "orient": "bottom", "columns": 3, "labelLimit": 260},
    }
    x = {
        "field": "context_length_tokens",
        "type": "quantitative",
        "title": "context length (tokens, log scale)",
        "scale": {"type": "log", "base": 2, "domain": [shortest, longest], "nice": False},
        "axis": {"values": _powers_of_two(shortest, longest), "labelExpr": _LENGTH_LABEL},
    }
    y = {
        "field": "value",
        "type": "quantitative",
        "title": axis_title,
        "scale": {"type": scale_type, "zero": False, "nice": True},
        "axis": {"tickCount": 6} | ({"format": "~g"} if scale_type == "log" else {}),
    }
    visible = {"filter": "indexof(hidden, datum.setting) < 0"}
    dash = {
        "field": "dashed",
        "type": "nominal",
        "scale": {"domain": [False, True], "range": [[1, 0], [6, 4]]},
        "legend": None,
    }
    shape = {
        "field": "setting",
        "type": "nominal",
        "scale": {"domain": order, "range": [looks[label].shape for label in order]},
        "legend": None,
    }
    for row in rows:
        row["dashed"] = looks[row["setting"]].dashed
    band: dict[str, Any] = {
        "transform": [visible, {"filter": "isValid(datum.ci95_low)"}],
        "mark": {"type": "area", "opacity": 0.16, "interpolate": "linear"},
        "encoding": {"x": x, "y": {**y, "field": "ci95_low"}, "y2": {"field": "ci95_high"}, "color": color},
    }
    line = {
        "transform": [visible],
        "mark": {"type": "line", "strokeWidth": 2.25, "strokeJoin": "round"},
        "encoding": {"x": x, "y": y, "color": color, "strokeDash": dash},
    }
    points = {
        "transform": [visible, {"filter": "isValid(datum.value)"}],
        "mark": {"type": "point", "filled": True, "opacity": 1},
        "encoding": {
            "x": x,
            "y": y,
            "color": color,
            "shape": shape,
            "size": {"condition": {"param": "hover", "empty": False, "value": 150}, "value": 46},
        },
    }
    targets = {
        "transform": [visible, {"filter": "isValid(datum.value)"}],
        "params": [
            {
                "name": "hover",
                "select": {
                    "type": "point",
                    "on": "pointerover",
                    "clear": "pointerout",
                    "nearest": True,
                    "fields": ["setting", "context_length_tokens"],
                },
            }
        ],
        "mark": {"type": "point", "size": 300, "opacity": 0, "filled": True},
        "encoding": {"x": x, "y": y, "tooltip": _tooltip(axis_title)},
    }
    layers = [*_training_marks(training_lengths, order, x), band, line, points, targets]
    if direct:
        layers.append(_labels_layer(ends, x, y, color, visible))
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {"text": title, "subtitle": subtitle},
        "description": description,
        "width": WIDTH_PIXELS,
        "height": HEIGHT_PIXELS,
        "padding": {"left": 6, "top": 6, "bottom": 6, "right": _label_room(ends, shortest, longest) if direct else 12},
        "params": [{"name": "hidden", "value": []}, {"name": "narrow", "value": False}],
        "data": {"values": rows},
        "layer": layers,
    }


def _length_domain(table: pd.DataFrame, training_lengths: Mapping[str, int]) -> tuple[int, int]:
    lengths = [int(length) for length in table["context_length_tokens"].dropna()]
    shown = set(table["setting"])
    marks = [length for label, length in training_lengths.items() if label in shown]
    return min([*lengths, *marks]), max([*lengths, *marks, DEFAULT_LONGEST_TOKENS])


def _powers_of_two(low: int, high: int) -> list[int]:
    return [2**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]


def _rows_with_gaps(table: pd.DataFrame, order: Sequence[str], number_format: str) -> list[dict[str, Any]]:
    """One row a setting and length; a length only others have becomes a null, so that the line breaks there."""
    every_length = sorted(int(length) for length in table["context_length_tokens"].dropna().unique())
    rows: list[dict[str, Any]] = []
    for label in order:
        own = table[table["setting"] == label].set_index("context_length_tokens")
        first, last = int(own.index.min()), int(own.index.max())
        for length in every_length:
            if not first <= length <= last:
                continue
            row: dict[str, Any] = {"setting": label, "context_length_tokens": length, "value": None}
            if length in own.index:
                found = own.loc[length]
                row |= {
                    "value": found["value"],
                    "ci95_low": _number(found["ci95_low"]),
                    "ci95_high": _number(found["ci95_high"]),
                    "length_text": f"{length:,} tokens",
                    "value_text": format(found["value"], number_format),
                    "interval_text": _interval_text(found["ci95_low"], found["ci95_high"], number_format),
                    "tokens_text": _count_text(found["tokens"]),
                    "clusters_text": _count_text(found["clusters"]),
                }
            rows.append(row)
    return rows


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _count_text(value: float) -> str:
    return "not recorded" if math.isnan(value) else f"{int(value):,}"


def _interval_text(low: float, high: float, number_format: str) -> str:
    return "none" if math.isnan(low) else f"{format(low, number_format)} to {format(high, number_format)}"


def _tooltip(value_title: str) -> list[dict[str, str]]:
    fields = {
        "setting": "model",
        "length_text": "context",
        "value_text": value_title.removesuffix(" (log scale)"),
        "interval_text": "95 % interval",
        "tokens_text": "scored tokens",
        "clusters_text": "documents",
    }
    return [{"field": field, "type": "nominal", "title": title} for field, title in fields.items()]


def _training_marks(
    training_lengths: Mapping[str, int], order: Sequence[str], x: Mapping[str, Any]
) -> list[dict[str, Any]]:
    lengths = sorted({training_lengths[label] for label in order if label in training_lengths})
    if not lengths:
        return []
    rows = [
        {"context_length_tokens": length, "text": f"trained at {length_text(length)}", "row": index % 2}
        for index, length in enumerate(lengths)
    ]
    return [
        {"data": {"values": rows}, "mark": {"type": "rule", "style": "training-length"}, "encoding": {"x": x}},
        {
            "data": {"values": rows},
            "mark": {
                "type": "text",
                "style": "training-length-text",
                "align": "left",
                "baseline": "top",
                "dx": 5,
                "dy": {"expr": "14 * datum.row"},
            },
            "encoding": {"x": x, "y": {"value": 0}, "text": {"field": "text"}},
        },
    ]


def _end_labels(rows: Sequence[Mapping[str, Any]], order: Sequence[str], scale_type: str) -> list[dict[str, Any]]:
    """The last point of every line with the shift in pixels that keeps the labels apart."""
    last = [
        max((row for row in rows if row["setting"] == label and row["value"] is not None), key=_row_length)
        for label in order
    ]
    shown = math.log if scale_type == "log" else float
    values = [shown(row["value"]) for row in rows if row["value"] is not None]
    span = (max(values) - min(values)) or 1.0
    heights = {row["setting"]: HEIGHT_PIXELS * (max(values) - shown(row["value"])) / span for row in last}
    placed = _spread(heights)
    return [{**row, "shift": placed[row["setting"]] - heights[row["setting"]]} for row in last]


def _row_length(row: Mapping[str, Any]) -> int:
    return int(row["context_length_tokens"])


def _spread(heights: Mapping[str, float]) -> dict[str, float]:
    """Moves heights (pixels from the top) apart to at least one label's height, each group around its own middle."""
    groups: list[tuple[list[str], float]] = []
    for label in sorted(heights, key=lambda label: heights[label]):
        groups.append(([label], heights[label]))
        while len(groups) > 1 and _top(groups[-1]) < _bottom(groups[-2]):
            (later, later_middle), (earlier, earlier_middle) = groups.pop(), groups.pop()
            count = len(earlier) + len(later)
            middle = (earlier_middle * len(earlier) + later_middle * len(later)) / count
            groups.append((earlier + later, middle))
    return {
        label: _top((labels, middle)) + (index + 0.5) * _LABEL_HEIGHT_PIXELS
        for labels, middle in groups
        for index, label in enumerate(labels)
    }


def _top(group: tuple[list[str], float]) -> float:
    return group[1] - len(group[0]) * _LABEL_HEIGHT_PIXELS / 2


def _bottom(group: tuple[list[str], float]) -> float:
    return group[1] + len(group[0]) * _LABEL_HEIGHT_PIXELS / 2


def _label_room(ends: Sequence[Mapping[str, Any]], shortest: int, longest: int) -> int:
    """Pixels right of the plot that the end labels need beyond the free octaves of the axis."""
    octave = WIDTH_PIXELS / max(1.0, math.log2(longest / shortest))
    needed = 12.0
    for row in ends:
        free = octave * math.log2(longest / row["context_length_tokens"])
        needed = max(needed, min(170.0, 7.0 * len(row["setting"])) + 18 - free)
    return round(needed)


def _labels_layer(
    ends: Sequence[Mapping[str, Any]],
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    color: Mapping[str, Any],
    visible: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "data": {"values": list(ends)},
        "transform": [visible, {"filter": "!narrow"}],
        "mark": {
            "type": "text",
            "style": "series-text",
            "align": "left",
            "baseline": "middle",
            "dx": 9,
            "dy": {"expr": "length(hidden) ? 0 : datum.shift"},
            "limit": 170,
        },
        "encoding": {"x": x, "y": y, "text": {"field": "setting"}, "color": {**color, "legend": None}},
    }
