"""Lines over a logarithmic axis of tokens, alone or as small multiples: what all curves of a report have in common."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.reports.figures.labels import (
    SYMLOG_CONSTANT,
    VISIBLE,
    Caption,
    Row,
    end_labels,
    level_lines,
    line_names,
    vertical_marks,
)
from sbeval.reports.figures.theme import Look

HEIGHT_PIXELS = 330
WIDTH_PIXELS = 620
DIRECT_LABELS_AT_MOST = 20

_LENGTH_LABEL = (
    "datum.value >= 1048576 ? datum.value / 1048576 + 'M' : "
    "datum.value >= 1024 ? datum.value / 1024 + 'K' : datum.value"
)
_MEASURED = {"filter": "isValid(datum.y)"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The two axes of a figure, of which that along x is logarithmic.

    Attributes:
        x_octaves: octaves from one named length to the next, None to choose.
        y_scale: "linear", "log", or "symlog" for one that is linear around zero and logarithmic away from it.
        y_domain: fixed ends, None to fit the lines shown.
        y_format: d3 format of the axis labels.
        y_values: the values named along the axis, None to choose.
        levels: heights of horizontal lines to the words beside them, such as zero for differences.
        x_values: the values named along the axis, None for lengths in octaves.
    """

    x_title: str | None
    x_domain: tuple[int, int]
    y_title: str | None
    x_octaves: int | None = None
    y_scale: str = "linear"
    y_domain: tuple[float, float] | None = None
    y_format: str | None = None
    y_values: tuple[float, ...] | None = None
    levels: Mapping[float, str] = dataclasses.field(default_factory=dict)
    x_values: tuple[int, ...] | None = None


def line_figure(
    rows: Sequence[Row],
    caption: Caption,
    *,
    axes: Axes,
    looks: Mapping[str, Look],
    marks: Mapping[int, str],
    tooltip: Mapping[str, str],
    height: int = HEIGHT_PIXELS,
    width: int = WIDTH_PIXELS,
    direct_labels: bool = True,
    hover: str = "hover",
    every_look: bool = False,
) -> dict[str, Any]:
    """Returns the Vega-Lite specification of lines, bands, points, marks and labels.

    Args:
        rows: dictionaries with `setting`, `x`, `y` (None breaks the line) and optionally `low`, `high`, plus the
            tooltip's fields.
        caption: what is said about it.
        axes: the two axes.
        looks: how to draw each model, in drawing order.
        marks: position on the x axis to the text of a vertical mark there.
        tooltip: field of a row to its name in the tooltip.
        height: of the plot, in pixels.
        width: likewise.
        direct_labels: False to leave the line ends unnamed where a legend stands beside the figure.
        hover: name of the selection under the pointer, unique among figures joined into one.
        every_look: True to give the scales all of `looks`, so that figures joined into one agree on them.
    """
    drawn = {row["setting"] for row in rows}
    order = [label for label in looks if every_look or label in drawn]
    shown = [{**row, "dashed": looks[row["setting"]].dashed} for row in rows]
    direct = direct_labels and len(order) <= DIRECT_LABELS_AT_MOST
    ends = end_labels(shown, order, axes.y_scale, height, axes.y_domain) if direct else []
    color = {
        "field": "setting",
        "type": "nominal",
        "scale": {"domain": order, "range": [looks[label].light for label in order]},
        "legend": None if direct else {"title": None, "orient": "bottom", "columns": 3, "labelLimit": 260},
    }
    x, y = _x(axes), _y(axes)
    low, high = axes.x_domain
    layers = [
        *vertical_marks({at: text for at, text in marks.items() if low <= at <= high}, x),
        *level_lines(axes.levels, y),
        _band(shown, x, y, color),
        _line(x, y, color),
        _spread(shown, x, y, color),
        _points(x, y, color, looks, order, hover),
        _pointer_targets(x, y, tooltip, hover),
        *line_names(ends, x, y, color),
    ]
    return {
        **caption.vega,
        "width": width,
        "height": height,
        "padding": {"left": 6, "top": 6, "bottom": 6, "right": 12},
        "params": [{"name": "hidden", "value": []}],
        **({"datasets": {"ends": ends}} if ends else {}),
        "data": {"values": shown},
        "layer": [layer for layer in layers if layer],
    }


def _x(axes: Axes) -> dict[str, Any]:
    low, high = axes.x_domain
    powers = [2**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    step = axes.x_octaves or (1 if len(powers) <= 10 else 2)
    return {
        "field": "x",
        "type": "quantitative",
        "title": axes.x_title,
        "scale": {"type": "log", "base": 2, "domain": [low, high], "nice": False},
        "axis": {
            "values": list(axes.x_values) if axes.x_values else powers[::-1][::step][::-1],
            "labelExpr": "datum.label" if axes.x_values else _LENGTH_LABEL,
            "labelFlush": False,
            "labelOverlap": "parity",
        },
    }


def _y(axes: Axes) -> dict[str, Any]:
    scale: dict[str, Any] = {"type": axes.y_scale, "nice": True} | ({"zero": False} if axes.y_scale == "linear" else {})
    if axes.y_scale == "symlog":
        scale["constant"] = SYMLOG_CONSTANT
    if axes.y_domain:
        scale |= {"domain": list(axes.y_domain), "nice": False}
    # Vega leaves out every other one of the values if there are more than its count of ticks
    axis: dict[str, Any] = {"values": list(axes.y_values), "labelOverlap": False} if axes.y_values else {"tickCount": 6}
    if axes.y_format:
        axis["format"] = axes.y_format
    return {"field": "y", "type": "quantitative", "title": axes.y_title, "scale": scale, "axis": axis}


def _band(rows: Sequence[Row], x: Row, y: Row, color: Row) -> Row:
    if all(row.get("low") is None for row in rows):
        return {}
    return {
        "transform": [VISIBLE],
        "mark": {"type": "area", "opacity": 1, "fillOpacity": 0.16},
        "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": color},
    }


def _line(x: Row, y: Row, color: Row) -> Row:
    dash_scale = {"domain": [False, True], "range": [[1, 0], [6, 4]]}
    dash = {"field": "dashed", "type": "nominal", "scale": dash_scale, "legend": None}
    return {
        "transform": [VISIBLE],
        "mark": {"type": "line", "strokeWidth": 2.25, "strokeJoin": "round"},
        "encoding": {"x": x, "y": y, "color": color, "strokeDash": dash},
    }


def _spread(rows: Sequence[Row], x: Row, y: Row, color: Row) -> Row:
    """Bars from the lowest to the highest of several training seeds."""
    if all(row.get("seed_low") is None for row in rows):
        return {}
    return {
        "transform": [VISIBLE, {"filter": "isValid(datum.seed_low)"}],
        "mark": {"type": "rule", "strokeWidth": 3, "opacity": 0.75},
        "encoding": {"x": x, "y": {**y, "field": "seed_low"}, "y2": {"field": "seed_high"}, "color": color},
    }


def _points(x: Row, y: Row, color: Row, looks: Mapping[str, Look], order: Sequence[str], hover: str) -> Row:
    scale = {"domain": list(order), "range": [looks[label].shape for label in order]}
    return {
        "transform": [VISIBLE, _MEASURED],
        "mark": {"type": "point", "filled": True, "opacity": 1},
        "encoding": {
            "x": x,
            "y": y,
            "color": color,
            "shape": {"field": "setting", "type": "nominal", "scale": scale, "legend": None},
            "size": {"condition": {"param": hover, "empty": False, "value": 150}, "value": 46},
        },
    }


def _pointer_targets(x: Row, y: Row, tooltip: Mapping[str, str], hover: str) -> Row:
    select = {"type": "point", "on": "pointerover", "clear": "pointerout", "fields": ["setting", "x"]}
    return {
        "transform": [VISIBLE, _MEASURED],
        "params": [{"name": hover, "select": select}],
        "mark": {"type": "point", "size": 520, "opacity": 1, "fillOpacity": 0, "filled": True},
        "encoding": {
            "x": x,
            "y": y,
            "tooltip": [{"field": field, "type": "nominal", "title": words} for field, words in tooltip.items()],
        },
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Multiple:
    """One of several figures side by side: its heading, and rows and axes as `line_figure` takes them."""

    name: str
    rows: Sequence[Row]
    axes: Axes


def small_multiples(
    multiples: Sequence[Multiple],
    caption: Caption,
    *,
    columns: int,
    height: int,
    width: int,
    looks: Mapping[str, Look],
    marks: Mapping[int, str],
    tooltip: Mapping[str, str],
) -> dict[str, Any]:
    """Returns figures with the same models, marks and colours; `height` and `width` in pixels are of each."""
    drawn = []
    for number, multiple in enumerate(multiples):
        spec = line_figure(
            multiple.rows,
            caption,
            axes=multiple.axes,
            looks=looks,
            marks=dict.fromkeys(marks, ""),
            tooltip=tooltip,
            height=height,
            width=width,
            direct_labels=False,
            hover=f"hover{number}",
            every_look=True,
        )
        kept = {key: spec[key] for key in ("width", "height", "data", "layer")}
        drawn.append({"title": {"text": multiple.name, "fontSize": 12, "offset": 6}, **kept})
    return {
        **caption.vega,
        "padding": 6,
        "columns": columns,
        "spacing": {"row": 22, "column": 26},
        "params": [{"name": "hidden", "value": []}],
        "concat": drawn,
        "resolve": {"legend": {"color": "shared"}, "scale": {"color": "shared", "shape": "shared"}},
    }
