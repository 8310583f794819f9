"""Needle heatmaps: depth by context length, with the mean by length on top."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.read.fields import length_text
from sbeval.reports.read.results import records

WIDTH_PIXELS = 380
_MEAN_HEIGHT_PIXELS = 70
_CELL_HEIGHT_PIXELS = 22
_NUMBERED_AT_MOST = 4
_FEWEST_ROWS = 3
_LIGHT_TEXT_BELOW = 0.55
_SCALE = {"domain": [0, 1], "scheme": "cividis"}


def heatmap_figure(
    cells: pd.DataFrame,
    *,
    models: Sequence[str],
    title: str,
    subtitle: str,
    description: str,
) -> dict[str, Any]:
    """Returns the Vega-Lite specification of one task: small multiples, one a model, on the same axes.

    Args:
        cells: columns setting, context_length_tokens, depth_percent, score, low, high, samples; a missing cell stays
            empty.
        models: the models in order.
        title: heading of the image files.
        subtitle: second line of the image files.
        description: the finding in words, for readers who cannot see the figure.
    """
    lengths = sorted(int(length) for length in cells["context_length_tokens"].unique())
    numbers = len(models) <= _NUMBERED_AT_MOST
    parts = []
    for label in models:
        own = records(cells[cells["setting"] == label])
        order = [length_text(length) for length in lengths]
        x: dict[str, Any] = {
            "field": "length",
            "type": "ordinal",
            "sort": order,
            "scale": {"type": "band", "domain": order, "paddingInner": 0.04, "paddingOuter": 0},
        }
        heading = {"text": label, "fontSize": 12.5, "offset": 8, "anchor": "start", "frame": "group"}
        parts.append(
            {
                "title": heading,
                "spacing": 8,
                "vconcat": [_means(_mean_rows(own), x), _grid(own, x, _depths(own), numbers=numbers)],
            }
        )
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {"text": title, "subtitle": subtitle},
        "description": description,
        "padding": 6,
        "spacing": {"row": 30, "column": 36},
        "columns": max(2, round(math.sqrt(len(models) / 2))),
        "concat": parts,
        "resolve": {"scale": {"color": "shared"}},
    }


def _depths(cells: Sequence[Mapping[str, Any]]) -> list[float]:
    return sorted({float(cell["depth_percent"]) for cell in cells})


def _mean_rows(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for length in dict.fromkeys(int(cell["context_length_tokens"]) for cell in cells):
        of_length = [cell for cell in cells if int(cell["context_length_tokens"]) == length]
        count = sum(float(cell["samples"]) for cell in of_length)
        score = sum(float(cell["score"]) * float(cell["samples"]) for cell in of_length) / count
        rows.append(
            {
                "length": length_text(length),
                "score": score,
                "score_text": f"{score:.1%}",
                "samples_text": f"{count:,.0f}",
            }
        )
    return rows


def _cell_rows(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "length": length_text(int(cell["context_length_tokens"])),
            "depth": float(cell["depth_percent"]),
            "score": float(cell["score"]),
            "percent": f"{100 * cell['score']:.0f}",
            "score_text": f"{cell['score']:.1%}",
            "interval_text": f"{cell['low']:.1%} to {cell['high']:.1%}",
            "depth_text": f"{cell['depth_percent']:.0f} % from the start",
            "samples_text": f"{int(cell['samples']):,}",
        }
        for cell in cells
    ]


def _means(means: list[dict[str, Any]], x: dict[str, Any]) -> dict[str, Any]:
    y = {
        "field": "score",
        "type": "quantitative",
        "title": "mean",
        "scale": {"domain": [0, 1]},
        "axis": {"values": [0, 0.5, 1], "format": ".0%"},
    }
    tooltip = _tooltip({"length": "context", "score_text": "mean score", "samples_text": "samples"})
    return {
        "width": WIDTH_PIXELS,
        "height": _MEAN_HEIGHT_PIXELS,
        "data": {"values": means},
        "encoding": {"x": {**x, "axis": None}, "y": y},
        "layer": [
            {"mark": {"type": "line", "style": "ink-line"}},
            {
                "mark": {"type": "point", "filled": True, "size": 60, "style": "ink-point"},
                "encoding": {"tooltip": tooltip},
            },
        ],
    }


def _grid(
    cells: Sequence[Mapping[str, Any]], x: dict[str, Any], depths: Sequence[float], *, numbers: bool
) -> dict[str, Any]:
    y = {
        "field": "depth",
        "type": "ordinal",
        "sort": list(depths),
        "title": "needle depth (% from the start)",
        "scale": {"paddingInner": 0.06, "paddingOuter": 0},
        "axis": {
            "labelExpr": "format(datum.value, '.0f')",
            "domain": False,
            "ticks": False,
            "labelOverlap": True,
            # many images of the same axis: its ends and middle say enough, and each label takes time to draw
            "values": list(depths) if numbers else [depths[0], depths[len(depths) // 2], depths[-1]],
        },
    }
    fields = {
        "length": "context",
        "depth_text": "depth",
        "score_text": "score",
        "interval_text": "95% interval",
        "samples_text": "samples",
    }
    legend = {
        "title": "score",
        "orient": "bottom",
        "direction": "horizontal",
        "format": ".0%",
        "values": [0, 0.5, 1],
        "gradientLength": 160,
        "gradientThickness": 10,
    }
    color = {"field": "score", "type": "quantitative", "scale": _SCALE, "legend": legend}
    letters = {
        "condition": {"test": f"datum.score < {_LIGHT_TEXT_BELOW}", "value": "#ffffff"},
        "value": "#101418",
    }
    text = {"mark": {"type": "text", "fontSize": 10}, "encoding": {"text": {"field": "percent"}, "color": letters}}
    return {
        "width": WIDTH_PIXELS,
        "height": (_CELL_HEIGHT_PIXELS if numbers else _CELL_HEIGHT_PIXELS // 2) * max(_FEWEST_ROWS, len(depths)),
        "data": {"values": _cell_rows(cells)},
        "encoding": {
            "x": {**x, "title": "context length (tokens)", "axis": {"labelAngle": 0, "domain": False, "ticks": False}},
            "y": y,
            "tooltip": _tooltip(fields),
        },
        "layer": [
            {"mark": {"type": "rect", "style": "heat-cell"}, "encoding": {"color": color}},
            *([text] if numbers else []),
        ],
    }


def _tooltip(fields: dict[str, str]) -> list[dict[str, str]]:
    return [{"field": field, "type": "nominal", "title": words} for field, words in fields.items()]
