"""Heat maps over context length: one grid a model, all on the same axes and one scale of colours."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sbeval.reports.figures.labels import SYMLOG_CONSTANT, Caption, Row, symlog, tooltip_fields
from sbeval.reports.read.fields import length_text

_WIDTH_PIXELS = 380
_CELL_HEIGHT_PIXELS = 22
NUMBERED_AT_MOST = 4
"""Grids of one figure that have numbers in their cells."""
_FEWEST_ROWS, _MOST_NUMBERED_ROWS = 3, 24
TITLE_LETTER_PIXELS = 7.0
"""Width of a letter of an axis' title, rather too large than too small."""
_LIGHT_TEXT_BELOW, _LIGHT_TEXT_BEYOND = 0.55, 0.6
_LETTERS = {"condition": {"test": "datum.dark", "value": "#ffffff"}, "value": "#101418"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shades:
    """The colours of cells: their legend and scale, which are dark enough for white numbers, and the digits."""

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
    """Returns the colours of NLL: the lower, the lighter, as high scores are."""
    low, high = min(values), max(values)
    return Shades(
        title="NLL (nats per token)",
        scale={"domain": [low, high], "scheme": "cividis", "reverse": True},
        is_dark=lambda value: value - low > (1 - _LIGHT_TEXT_BELOW) * (high - low),
        number_format=".1f",
    )


def difference_shades(values: Sequence[float], title: str) -> Shades:
    """Returns the colours of differences in NLL: blue below zero, orange above, stretched near zero."""
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
    """Returns the channel of context lengths, whose names stand in a row's `length`."""
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
    """Returns one grid of cells, each with `length`, `row`, `value`, the `text` shown in it and the tooltip's fields.

    `rows` are all rows from the top down; few of them are named where cells have no numbers.
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
        # many images of the same axis: its ends and middle say enough, and each label takes time to draw
        "axis": {**axis, "values": list(named)},
    }
    legend: dict[str, Any] = {"title": shades.title, "orient": "bottom", "direction": "horizontal"}
    legend |= {"format": shades.number_format, "gradientLength": 160, "gradientThickness": 10}
    legend |= {"values": list(shades.values)} if shades.values else {"tickCount": 4}
    color = {"field": "value", "type": "quantitative", "scale": dict(shades.scale), "legend": legend}
    mark = {"type": "text", "fontSize": 12}
    text = {"mark": mark, "encoding": {"text": {"field": "text"}, "color": _LETTERS}}
    y["title"], height = _beside(y_title, (_CELL_HEIGHT_PIXELS // (1 if numbers else 2)) * max(_FEWEST_ROWS, len(rows)))
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


def _beside(title: str, height: int) -> tuple[str | list[str], int]:
    """Returns a title that runs along a grid, broken before its parenthesis where it is longer, and a height for it."""
    lines = title.replace(" (", "\n(").split("\n") if len(title) * TITLE_LETTER_PIXELS > height else [title]
    least = math.ceil(TITLE_LETTER_PIXELS * max(map(len, lines)))
    return lines if len(lines) > 1 else title, max(height, least)


def above(panel: dict[str, Any], image: dict[str, Any]) -> dict[str, Any]:
    """Returns a grid with an image of the same lengths on top."""
    return {"spacing": 8, "vconcat": [{"width": _WIDTH_PIXELS, **image}, panel]}


def heatmaps(panels: Mapping[str, dict[str, Any]], caption: Caption) -> dict[str, Any]:
    """Returns the Vega-Lite specification of grids under the names of their models."""
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
