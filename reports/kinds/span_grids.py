"""Attention spans as grids of layer by head: one column a share of the weight, one row a context length."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.figures.labels import Caption, tooltip_fields
from sbeval.reports.read.fields import length_text
from sbeval.reports.read.results import records

_SHARES = {"span50": "50% of the weight", "span90": "90%", "span99": "99%"}
_REMAINDER = "remaining stick"
_TOOLTIP = {
    "layer": "layer",
    "head": "head",
    "length_text": "context",
    **{f"{share}_text": words for share, words in _SHARES.items()},
    "remainder_text": _REMAINDER,
}
_SHORTEST_SIDE_PIXELS, _LONGEST_SIDE_PIXELS, _CELL_PIXELS = 96, 190, 16


def span_grids(heads: pd.DataFrame, lengths: Sequence[int], caption: Caption) -> dict[str, Any]:
    """Returns the Vega-Lite specification of one model's spans, one row a length; a head without weight stays empty."""
    sticks = bool((heads["remainder"].fillna(0) > 0).any())
    fields = {**_SHARES, **({"remainder": _REMAINDER} if sticks else {})}
    width, height = (_side(int(heads[name].nunique())) for name in ("head", "layer"))
    grids = []
    for length in lengths:
        rows = [_row(row) for row in records(heads[heads["context_length_tokens"] == length])]
        last = length == lengths[-1]
        for place, (field, words) in enumerate(fields.items()):
            ends = {"domain": [0, 1]} if field == "remainder" else {"type": "log", "domain": [1, max(lengths)]}
            scale = {"scheme": "cividis", **ends}
            legend = _legend(field) if last and field in ("span50", "remainder") else None
            encoding = {
                "x": _axis("head", named=last),
                # every second image names its layers, so that rows of four and of two both begin with names
                "y": _axis("layer", named=place % 2 == 0),
                "color": {"field": field, "type": "quantitative", "scale": scale, "legend": legend},
                "tooltip": tooltip_fields(_TOOLTIP),
            }
            grids.append(_grid(rows, f"{length_text(length)}: {words}", (width, height), field, encoding))
    return {
        **caption.vega,
        "usermeta": {"partPixels": width + 62},
        "padding": 6,
        "columns": len(fields),
        "spacing": {"row": 14, "column": 18},
        "concat": grids,
        "resolve": {"scale": {"color": "independent"}},
    }


def _side(count: int) -> int:
    return min(_LONGEST_SIDE_PIXELS, max(_SHORTEST_SIDE_PIXELS, _CELL_PIXELS * count))


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    spans = {field: None if math.isnan(row[field]) else float(row[field]) for field in _SHARES}
    remainder = None if math.isnan(row["remainder"]) else float(row["remainder"])
    texts = {f"{field}_text": "no weight" if value is None else f"{value:,.1f} keys" for field, value in spans.items()}
    return {
        "layer": int(row["layer"]),
        "head": int(row["head"]),
        **spans,
        **texts,
        "remainder": remainder,
        "remainder_text": "not recorded" if remainder is None else f"{remainder:.1%}",
        "length_text": f"{int(row['context_length_tokens']):,} tokens",
    }


def _legend(field: str) -> dict[str, Any]:
    share = (
        {"title": "keys (log scale)", "format": "~s"} if field != "remainder" else {"title": "stick", "format": ".0%"}
    )
    return {**share, "orient": "bottom", "direction": "horizontal", "gradientLength": 96, "gradientThickness": 8}


def _axis(field: str, *, named: bool) -> dict[str, Any]:
    axis = {"domain": False, "ticks": False, "labelOverlap": True, "labelAngle": 0}
    shown = axis if named else {**axis, "labels": False}
    return {"field": field, "type": "ordinal", "title": field if named else None, "axis": shown}


def _grid(
    rows: Sequence[Mapping[str, Any]], title: str, size: tuple[int, int], field: str, encoding: dict[str, Any]
) -> dict[str, Any]:
    cells = {"transform": [{"filter": f"isValid(datum.{field})"}], "mark": {"type": "rect", "style": "heat-cell"}}
    return {
        "title": {"text": title, "fontSize": 12, "fontWeight": 500, "offset": 5, "anchor": "start", "frame": "group"},
        "width": size[0],
        "height": size[1],
        "data": {"values": list(rows)},
        "layer": [{**cells, "encoding": encoding}],
    }
