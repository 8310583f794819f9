"""Needle heatmaps: depth by context length, with the mean by length on top."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from sbeval.reports.settings import length_text
from sbeval.reports.table import records

WIDTH_PIXELS = 400
_MEAN_HEIGHT_PIXELS = 70
_CELL_HEIGHT_PIXELS = 22
_LIGHT_TEXT_BELOW = 0.55
_SCALE = {"domain": [0, 1], "scheme": "cividis"}


def heatmap_figure(
    cells: pd.DataFrame, *, lengths: Sequence[int], title: str, subtitle: str, description: str
) -> dict[str, Any]:
    """Returns the Vega-Lite specification for one task and model.

    Args:
        cells: columns context_length_tokens, depth_percent, score, low, high, samples.
        lengths: all lengths of the axis in tokens, so that small multiples line up; a missing cell stays empty.
        title: heading of the image files.
        subtitle: second line of the image files.
        description: the finding in words, for readers who cannot see the figure.
    """
    rows: list[dict[str, Any]] = [
        {
            "length": length_text(int(row["context_length_tokens"])),
            "depth": float(row["depth_percent"]),
            "score": float(row["score"]),
            "percent": f"{row['score']:.0%}".removesuffix("%"),
            "score_text": f"{row['score']:.1%}",
            "interval_text": f"{row['low']:.1%} to {row['high']:.1%}",
            "depth_text": f"{row['depth_percent']:.0f} % from the start",
            "samples_text": f"{int(row['samples']):,}",
        }
        for row in records(cells)
    ]
    means = []
    for length, part in cells.groupby("context_length_tokens"):
        count = float(part["samples"].sum())
        score = float((part["score"] * part["samples"]).sum() / count)
        means.append(
            {
                "length": length_text(int(str(length))),
                "score": score,
                "score_text": f"{score:.1%}",
                "samples_text": f"{count:,.0f}",
            }
        )
    depths = sorted({row["depth"] for row in rows})
    order = [length_text(length) for length in lengths]
    x: dict[str, Any] = {
        "field": "length",
        "type": "ordinal",
        "sort": order,
        "scale": {"domain": order, "paddingInner": 0.04, "paddingOuter": 0},
    }
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {"text": title, "subtitle": subtitle},
        "description": description,
        "padding": 6,
        "spacing": 8,
        "vconcat": [_means(means, x), _grid(rows, x, depths)],
        "resolve": {"scale": {"color": "shared"}},
    }


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


def _grid(rows: list[dict[str, Any]], x: dict[str, Any], depths: Sequence[float]) -> dict[str, Any]:
    y = {
        "field": "depth",
        "type": "ordinal",
        "sort": list(depths),
        "title": "needle depth (% from the start)",
        "scale": {"paddingInner": 0.06, "paddingOuter": 0},
        "axis": {"labelExpr": "format(datum.value, '.0f')", "domain": False, "ticks": False, "labelOverlap": True},
    }
    fields = {
        "length": "context",
        "depth_text": "depth",
        "score_text": "score",
        "interval_text": "95 % interval",
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
    return {
        "width": WIDTH_PIXELS,
        "height": max(120, _CELL_HEIGHT_PIXELS * len(depths)),
        "data": {"values": rows},
        "encoding": {
            "x": {**x, "title": "context length (tokens)", "axis": {"labelAngle": 0, "domain": False, "ticks": False}},
            "y": y,
        },
        "layer": [
            {"mark": {"type": "rect", "cornerRadius": 2}, "encoding": {"color": color, "tooltip": _tooltip(fields)}},
            {
                "mark": {"type": "text", "fontSize": 10, "tooltip": None},
                "encoding": {"text": {"field": "percent"}, "color": letters},
            },
        ],
    }


def _tooltip(fields: dict[str, str]) -> list[dict[str, str]]:
    return [{"field": field, "type": "nominal", "title": words} for field, words in fields.items()]
