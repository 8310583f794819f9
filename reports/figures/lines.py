"""Line plots with a logarithmic x axis, which mostly shows context length; as single plots or small multiples."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.figures import labels, lengths
from sbeval.reports.figures.labels import VISIBLE, Caption, Row, tooltip_fields
from sbeval.reports.figures.theme import Look
from sbeval.reports.read.results import LENGTH, by_model, column_values

HEIGHT_PIXELS = 330
WIDTH_PIXELS = 620
DIRECT_LABELS_AT_MOST = 20
METRIC_NAMES = {"nll": "NLL", "token_perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}
COUNTED = {"tokens_text": "scored tokens", "clusters_text": "documents"}
"""Tooltip fields: the number of scored tokens and of documents that a number is computed from."""
SCORE_TOOLTIP = {"setting": "model", "length_text": "context", "value_text": "score", "interval_text": "95% interval"}
SHARES: dict[str, Any] = {"y_domain": (0.0, 1.0), "y_format": ".0%"}
"""Fields of `Axes` for a quantity between 0 and 100 percent."""

_MEASURED = {"filter": "isValid(datum.y)"}
_NO_BAND = {"low": None, "high": None}
_BAND = {"type": "area", "opacity": 1, "fillOpacity": 0.16}
_SEEDS = {"type": "rule", "strokeWidth": 3, "opacity": 0.75}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The two axes of a line plot. The x axis is always logarithmic.

    Attributes:
        x_octaves: octaves between neighbouring labels of the x axis; if None, chosen by the range of the axis.
        y_scale: "linear", "log", or "symlog" (linear around zero and logarithmic away from it).
        y_domain: fixed ends of the y axis; if None, they are chosen to fit the lines.
        y_format: d3 format of the labels of the y axis.
        y_values: the labelled values of the y axis; if None, Vega chooses them.
        levels: y value of a horizontal line, such as zero for differences, to the label of the line.
        start_level: the level near which the lines begin, whose label is at the right end; None if there is none.
        x_values: the labelled values of the x axis if it shows something other than context lengths; else None.
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
    start_level: float | None = None
    x_values: tuple[int, ...] | None = None


def line_figure(
    rows: Sequence[Row],
    caption: Caption,
    *,
    axes: Axes,
    looks: Mapping[str, Look],
    tooltip: Mapping[str, str],
    height: int = HEIGHT_PIXELS,
    width: int = WIDTH_PIXELS,
    panel: int | None = None,
) -> dict[str, Any]:
    """Returns the Vega-Lite specification of a plot with one line for each model, with bands, points and labels.

    Args:
        rows: dictionaries with `setting` (model label), `x`, `y` (None breaks the line) and optionally `low` and `high`
            (ends of the interval), plus the tooltip's fields.
        caption: title, description and other texts of the figure.
        axes: the two axes.
        looks: model label to colours and marker shape, in drawing order; models without a row are left out.
        tooltip: field of a row to the name of the field in the tooltip.
        height: height of the plot in pixels.
        width: width of the plot in pixels.
        panel: index of the plot among small multiples; None for a single plot. Small multiples have one legend and one
            colour scale for all `looks`, and the lines at training lengths have no labels.
    """
    drawn = {row["setting"] for row in rows}
    order = [label for label in looks if label in drawn or panel is not None]
    units = [] if axes.x_values else lengths.units_shown({label: looks[label] for label in order})
    points = []
    for row in rows:
        look = looks[row["setting"]]
        points.append({**row, "dashed": look.dashed, **lengths.places(look, row["x"], units)})
    direct = panel is None and len(order) <= DIRECT_LABELS_AT_MOST
    hover = "hover" if panel is None else f"hover{panel}"
    ends = labels.end_labels(points, order, axes.y_scale, height, axes.y_domain, units) if direct else []
    color = {
        "field": "setting",
        "type": "nominal",
        "scale": {"domain": order, "range": [looks[label].light for label in order]},
        "legend": None if direct else {"title": None, "orient": "bottom", "columns": 3, "labelLimit": 260},
    }
    x, y = _x(axes), _y(axes)
    low, high = axes.x_domain
    marks = [mark for mark in training_marks(looks, order) if low <= mark <= high and not axes.x_values]
    layers = [
        *labels.vertical_marks(marks, x, units, worded=panel is None),
        *labels.level_lines(axes.levels, y, start=axes.start_level),
        _between(points, "low", "high", _BAND, x, y, color),
        _line(x, y, color),
        _between(points, "seed_low", "seed_high", _SEEDS, x, y, color, {"filter": "isValid(datum.seed_low)"}),
        _points(x, y, color, looks, order, hover),
        _pointer_targets(x, y, tooltip, hover),
        *labels.line_names(ends, x, y, color),
    ]
    return {
        **caption.vega,
        "width": width,
        "height": height,
        "padding": {"left": 6, "top": 6, "bottom": 6, "right": 12},
        "params": [{"name": "hidden", "value": []}],
        **({"datasets": {"ends": ends}} if ends else {}),
        "usermeta": {"axes": lengths.unit_channels(points, axes.x_title, axes.x_octaves, units)},
        "data": {"values": points},
        "layer": [layer for layer in layers if layer],
    }


def _x(axes: Axes) -> dict[str, Any]:
    channel = lengths.length_channel(axes.x_title, axes.x_domain, axes.x_octaves)
    if axes.x_values:
        channel["axis"] |= {"values": list(axes.x_values), "labelExpr": "datum.label"}
    return {"field": "x", "type": "quantitative", **channel}


def _y(axes: Axes) -> dict[str, Any]:
    scale: dict[str, Any] = {"type": axes.y_scale, "nice": True} | ({"zero": False} if axes.y_scale == "linear" else {})
    if axes.y_scale == "symlog":
        scale["constant"] = labels.SYMLOG_CONSTANT
    if axes.y_domain:
        scale |= {"domain": list(axes.y_domain), "nice": False}
    # unless labelOverlap is False, Vega drops every second label if there are more than it would choose itself
    axis: dict[str, Any] = {"values": list(axes.y_values), "labelOverlap": False} if axes.y_values else {"tickCount": 6}
    if axes.y_format:
        axis["format"] = axes.y_format
    return {"field": "y", "type": "quantitative", "title": axes.y_title, "scale": scale, "axis": axis}


def _between(rows: Sequence[Row], low: str, high: str, mark: Row, x: Row, y: Row, color: Row, *filters: Row) -> Row:
    """Returns a layer whose mark reaches from field `low` to field `high`; an empty one if no row has these fields."""
    if all(row.get(low) is None for row in rows):
        return {}
    encoding = {"x": x, "y": {**y, "field": low}, "y2": {"field": high}, "color": color}
    return {"transform": [VISIBLE, *filters], "mark": mark, "encoding": encoding}


def _line(x: Row, y: Row, color: Row) -> Row:
    dash_scale = {"domain": [False, True], "range": [[1, 0], [6, 4]]}
    dash = {"field": "dashed", "type": "nominal", "scale": dash_scale, "legend": None}
    mark = {"type": "line", "strokeWidth": 2.25, "strokeJoin": "round"}
    encoding = {"x": x, "y": y, "color": color, "strokeDash": dash}
    return {"transform": [VISIBLE], "mark": mark, "encoding": encoding}


def _points(x: Row, y: Row, color: Row, looks: Mapping[str, Look], order: Sequence[str], hover: str) -> Row:
    scale = {"domain": list(order), "range": [looks[label].shape for label in order]}
    shape = {"field": "setting", "type": "nominal", "scale": scale, "legend": None}
    size = {"condition": {"param": hover, "empty": False, "value": 150}, "value": 46}
    return {
        "transform": [VISIBLE, _MEASURED],
        "mark": {"type": "point", "filled": True, "opacity": 1},
        "encoding": {"x": x, "y": y, "color": color, "shape": shape, "size": size},
    }


def _pointer_targets(x: Row, y: Row, tooltip: Mapping[str, str], hover: str) -> Row:
    select = {"type": "point", "on": "pointerover", "clear": "pointerout", "fields": ["setting", "x"]}
    return {
        "transform": [VISIBLE, _MEASURED],
        "params": [{"name": hover, "select": select}],
        "mark": {"type": "point", "size": 520, "opacity": 1, "fillOpacity": 0, "filled": True},
        "encoding": {"x": x, "y": y, "tooltip": tooltip_fields(tooltip)},
    }


def training_marks(looks: Mapping[str, Look], shown_labels: Iterable[str]) -> list[int]:
    """Returns the training lengths, in tokens, of the models shown."""
    return sorted({mark for label in shown_labels if (mark := looks[label].training_length_tokens)})


def small_multiples(
    panels: Mapping[str, tuple[Sequence[Row], Axes]], caption: Caption, *, columns: int, **shared: Any
) -> dict[str, Any]:
    """Returns the Vega-Lite specification of small multiples: line plots with the same models and colours.

    Args:
        panels: heading of a plot to the rows and axes of the plot.
        caption: title, description and other texts of the whole figure.
        columns: number of plots side by side.
        shared: other arguments of `line_figure`, the same for every plot.
    """
    drawn = []
    channels: dict[str, dict[str, Any]] = {}
    for number, (name, (rows, axes)) in enumerate(panels.items()):
        spec = line_figure(rows, caption, axes=axes, panel=number, **shared)
        for unit, channel in lengths.axes_of(spec).items():
            ends = [*channel["scale"]["domain"], *channels.get(unit, channel)["scale"]["domain"]]
            channels[unit] = lengths.length_channel(axes.x_title, (min(ends), max(ends)), axes.x_octaves, unit)
        plot = {key: spec[key] for key in ("width", "height", "data", "layer")}
        drawn.append({"title": {"text": name, "fontSize": 12, "offset": 6}, **plot})
    return {
        **caption.vega,
        "usermeta": {"axes": channels},
        "padding": 6,
        "columns": columns,
        "spacing": {"row": 22, "column": 26},
        "params": [{"name": "hidden", "value": []}],
        "concat": drawn,
        "resolve": {"legend": {"color": "shared"}, "scale": {"color": "shared", "shape": "shared"}},
    }


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
    """Returns the Vega-Lite specification of a measured quantity against context length, one line for each model.

    Args:
        table: a table with columns setting (model label), context_length_tokens, value, ci95_low, ci95_high and, if
            known, tokens and clusters (number of documents).
        caption: title, description and other texts of the figure.
        looks: model label to colours and marker shape; models that are not in the table are left out.
        number_format: Python format of the numbers in the tooltip.
        tooltip: field of a row to the name of the field in the tooltip.
        x_title: title of the x axis.
        y_axis: fields of `Axes` for the y axis.
    """
    rows = length_rows(table, looks, number_format)
    axes = Axes(x_title=x_title, x_domain=length_domain(table, looks), **y_axis)
    return line_figure(rows, caption, axes=axes, looks=looks, tooltip=with_seeds(tooltip, rows))


def with_seeds(tooltip: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Adds the range over training seeds to the tooltip's fields if some line is the mean of several seeds."""
    return {**tooltip, **({"seeds_text": "seeds"} if any(row.get("seed_low") is not None for row in rows) else {})}


def length_domain(table: pd.DataFrame, looks: Mapping[str, Look]) -> tuple[int, int]:
    """Returns the ends of the length axis, in tokens.

    The axis includes all measured lengths, and training lengths that are at most a factor of two outside their range.
    """
    lengths = column_values(table)
    low, high = lengths[0], lengths[-1]
    near = [mark for mark in training_marks(looks, table["setting"]) if low <= 2 * mark <= 4 * high]
    low, high = min([low, *near]), max([high, *near])
    return (low, high) if low < high else (max(1, low // 2), 2 * high)


def length_rows(table: pd.DataFrame, order: Iterable[str], number_format: str, column: str = LENGTH) -> list[Row]:
    """Returns the rows of `line_figure`: one for each model and context length.

    If a model lacks a length that other models have, `y` is None, so that the line of the model has a gap there. There
    is also a gap between two lengths whose numbers are of different samples (column `samples_sha256`, if there is one).

    Args:
        table: a table with columns setting (model label), value, ci95_low, ci95_high and `column`; tokens and clusters
            may be missing.
        order: labels of the models to draw, in drawing order.
        number_format: Python format of the numbers in the tooltip.
        column: name of the column for the x axis, such as training steps instead of context lengths.
    """
    every_length = column_values(table, column)
    rows: list[dict[str, Any]] = []
    rows_of = by_model(table)
    for label in (label for label in order if label in rows_of):
        measured = {int(row[column]): row for row in rows_of[label]}
        first, last = min(measured), max(measured)
        for length in every_length:
            if length in measured:
                if (earlier := _last_measured(rows, label)) is not None and _other_samples(
                    measured[earlier], measured[length]
                ):
                    rows.append({"setting": label, "x": math.sqrt(earlier * length), "y": None, **_NO_BAND})
                rows.append(_row(label, length, measured[length], number_format))
            elif first < length < last:
                rows.append({"setting": label, "x": length, "y": None, **_NO_BAND})
    return rows


def _last_measured(rows: Sequence[Row], label: str) -> int | None:
    """Returns the last length in the rows at which a model has a number; None if it has none."""
    return next((row["x"] for row in reversed(rows) if row["setting"] == label and row["y"] is not None), None)


def _other_samples(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two numbers of a curve are of different samples."""
    digests = [number.get("samples_sha256") for number in (one, other)]
    known = [digest if isinstance(digest, str) else None for digest in digests]
    return known[0] != known[1]


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
    """Returns a count as text; "not recorded" for NaN."""
    return "not recorded" if math.isnan(value) else f"{int(value):,}"
