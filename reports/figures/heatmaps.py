"""Heat maps over context length: one grid of cells for each model, all grids with the same axes and colour scale."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sbeval.reports.figures.labels import SYMLOG_CONSTANT, Caption, Row, symlog, tooltip_fields
from sbeval.reports.read.fields import length_text

_WIDTH_PIXELS = 380
_CELL_HEIGHT_PIXELS = 22
NUMBERED_AT_MOST = 4
"""If a figure has more grids than this, its cells show no numbers."""
_FEWEST_ROWS = 3
_MOST_NUMBERED_ROWS = 24
TITLE_LETTER_PIXELS = 7.0
"""Width in pixels that is assumed for a letter in an axis title: an upper bound, so that titles never overlap."""
_LIGHT_TEXT_BELOW = 0.55
"""In cells below this share of the cividis colour scale, whose low end is dark, numbers are white."""
_LIGHT_TEXT_BEYOND = 0.6
"""In cells beyond this share of either half of the blue-orange colour scale, whose ends are dark, numbers are white."""
_LETTERS = {"condition": {"test": "datum.dark", "value": "#ffffff"}, "value": "#101418"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shades:
    """The colour scale of a heat map's cells, and the format of the numbers in them.

    Attributes:
        title: title of the legend.
        scale: Vega-Lite's `scale` of the colour channel.
        is_dark: a function that tells whether the colour for a value is so dark that the number must be white.
        number_format: d3 format of the numbers in the legend.
        digits: Python format of the numbers in the cells.
        values: the values shown in the legend; if None, Vega chooses them.
    """

    title: str
    scale: Mapping[str, Any]
    is_dark: Callable[[float], bool]
    number_format: str
    digits: str = ".2f"
    values: tuple[float, ...] | None = None


SCORES = Shades(
    title="score",
    scale={"domain": [0, 1], "scheme": "cividis"},
    is_dark=lambda score: score < _LIGHT_TEXT_BELOW,
    number_format=".0%",
    values=(0, 0.5, 1),
)


def nll_shades(values: Sequence[float]) -> Shades:
    """Returns the colour scale for NLL: a low NLL is light. A high score is light too, so light always means good."""
    low, high = min(values), max(values)
    return Shades(
        title="NLL (nats per token)",
        scale={"domain": [low, high], "scheme": "cividis", "reverse": True},
        is_dark=lambda value: value - low > (1 - _LIGHT_TEXT_BELOW) * (high - low),
        number_format=".1f",
    )


def difference_shades(values: Sequence[float], title: str) -> Shades:
    """Returns the colour scale for differences in NLL: blue below zero, orange above, on a symlog scale."""
    largest = max(map(abs, values)) or 1.0
    ends = {"domain": [-largest, largest], "scheme": "blueorange", "reverse": False}
    return Shades(
        title=title,
        scale={"type": "symlog", "constant": SYMLOG_CONSTANT, **ends},
        is_dark=lambda value: symlog(abs(value)) > _LIGHT_TEXT_BEYOND * symlog(largest),
        number_format="+.2~f",
        digits="+.2f",
        values=(-largest, 0.0, largest),
    )


def length_bands(lengths: Sequence[int]) -> dict[str, Any]:
    """Returns Vega-Lite's x channel with one column for each context length; data rows need the field `length`."""
    order = list(map(length_text, lengths))
    band = {"type": "band", "domain": order, "paddingInner": 0.04, "paddingOuter": 0}
    return {"field": "length", "type": "ordinal", "sort": order, "scale": band}


def grid(
    cells: Sequence[Row],
    x: Mapping[str, Any],
    *,
    rows: Sequence[float | str],
    y_title: str,
    shades: Shades,
    tooltip: Mapping[str, str],
    numbers: bool,
) -> dict[str, Any]:
    """Returns the Vega-Lite specification of one grid.

    Args:
        cells: dictionaries with `length` and `row` (column and row of the cell), `value` (determines its colour),
            `text` (shown in the cell) and the tooltip's fields.
        x: the x channel that `length_bands` returns.
        rows: values of `row` from the top down. If cells show no numbers, only the first, middle and last row are
            labelled.
        y_title: title of the y axis.
        shades: the colour scale.
        tooltip: field of a cell to the name of the field in the tooltip.
        numbers: whether cells show their text; in grids with many rows they never do.
    """
    numbers = numbers and len(rows) <= _MOST_NUMBERED_ROWS
    named = rows if numbers else [rows[0], rows[len(rows) // 2], rows[-1]]
    label = "isNumber(datum.value) ? format(datum.value, '.0f') : datum.value"
    axis = {"labelExpr": label, "domain": False, "ticks": False, "labelOverlap": True, "labelLimit": 150}
    y = {
        "field": "row",
        "type": "ordinal",
        "sort": list(rows),
        "scale": {"paddingInner": 0.06, "paddingOuter": 0},
        # every grid has this axis: labels at its ends and middle are enough, and every label takes time to draw
        "axis": {**axis, "values": list(named)},
    }
    legend: dict[str, Any] = {"title": shades.title, "orient": "bottom", "direction": "horizontal"}
    legend |= {"format": shades.number_format, "gradientLength": 160, "gradientThickness": 10}
    legend |= {"values": list(shades.values)} if shades.values else {"tickCount": 4}
    color = {"field": "value", "type": "quantitative", "scale": dict(shades.scale), "legend": legend}
    mark = {"type": "text", "fontSize": 12}
    text = {"mark": mark, "encoding": {"text": {"field": "text"}, "color": _LETTERS}}
    row_height = _CELL_HEIGHT_PIXELS if numbers else _CELL_HEIGHT_PIXELS // 2
    y["title"], height = _fit_axis_title(y_title, row_height * max(_FEWEST_ROWS, len(rows)))
    return {
        "width": _WIDTH_PIXELS,
        "height": height,
        "data": {"values": [cell | {"dark": shades.is_dark(cell["value"])} for cell in cells]},
        "encoding": {
            "x": {**x, "title": "context length (tokens)", "axis": {"labelAngle": 0, "domain": False, "ticks": False}},
            "y": y,
            "tooltip": tooltip_fields(tooltip),
        },
        "layer": [
            {"mark": {"type": "rect", "style": "heat-cell"}, "encoding": {"color": color}},
            *([text] if numbers else []),
        ],
    }


def _fit_axis_title(title: str, height: int) -> tuple[str | list[str], int]:
    """Returns the title of the y axis and the grid's height in pixels, chosen so that the title fits beside the grid.

    A title longer than the grid's height is broken before its parenthesis. If it still does not fit, the grid is made
    higher.
    """
    lines = title.replace(" (", "\n(").split("\n") if len(title) * TITLE_LETTER_PIXELS > height else [title]
    least = math.ceil(TITLE_LETTER_PIXELS * max(map(len, lines)))
    return lines if len(lines) > 1 else title, max(height, least)


def above(panel: dict[str, Any], plot_on_top: dict[str, Any]) -> dict[str, Any]:
    """Returns the specification of a grid with another plot above it; both share the x axis."""
    return {"spacing": 8, "vconcat": [{"width": _WIDTH_PIXELS, **plot_on_top}, panel]}


def heatmaps(panels: Mapping[str, dict[str, Any]], caption: Caption) -> dict[str, Any]:
    """Returns the Vega-Lite specification of a figure of several grids; the title of each is the label of a model."""
    drawn = []
    for label, panel in panels.items():
        heading = {"text": label, "fontSize": 12.5, "offset": 8, "anchor": "start", "frame": "group"}
        drawn.append({"title": heading, **panel})
    return {
        **caption.vega,
        "padding": 6,
        "spacing": {"row": 30, "column": 36},
        "columns": max(2, round(math.sqrt(len(panels) / 2))),
        "concat": drawn,
        "resolve": {"scale": {"color": "shared"}},
    }
