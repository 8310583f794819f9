"""Layers that explain a line figure: marks, levels, and the names of its lines."""

from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.reports.figures.labels import WIDEST_PIXELS

Row = dict[str, Any]
VISIBLE = {"filter": "indexof(hidden, datum.setting) < 0"}


def vertical_marks(marks: Mapping[int, str], x: Row) -> list[Row]:
    """Returns dotted lines with their words above the plot, in three rows so that neighbours do not touch."""
    if not marks:
        return []
    first = x["scale"]["domain"][0]
    rows = [
        {"x": value, "text": marks[value], "row": index % 3, "first": value == first}
        for index, value in enumerate(sorted(marks))
    ]
    # centred words at the axis' own start would stand on its topmost label
    align = {"expr": "datum.first ? 'left' : 'center'"}
    text = {"type": "text", "style": "mark-text", "align": align, "baseline": "bottom"}
    return [
        {"data": {"values": rows}, "mark": {"type": "rule", "style": "mark-line"}, "encoding": {"x": x}},
        {
            "data": {"values": rows},
            "mark": {**text, "dy": {"expr": "-5 - 13 * datum.row"}},
            "encoding": {"x": x, "y": {"value": 0}, "text": {"field": "text"}},
        },
    ]


def level_lines(levels: Mapping[float, str], y: Row) -> list[Row]:
    """Returns horizontal lines, with words where there are some."""
    if not levels:
        return []
    rows = [{"y": value, "text": text} for value, text in levels.items()]
    text = {"type": "text", "style": "mark-text", "align": "left", "baseline": "top", "dx": 4, "dy": 4}
    rule = {"data": {"values": rows}, "mark": {"type": "rule", "style": "zero-line"}, "encoding": {"y": y}}
    worded = [row for row in rows if row["text"]]
    words = {"x": {"value": 0}, "y": y, "text": {"field": "text"}}
    return [rule, {"data": {"values": worded}, "mark": text, "encoding": words}] if worded else [rule]


def line_names(ends: Sequence[Row], x: Row, y: Row, color: Row) -> list[Row]:
    """Returns names beside the lines' ends, each joined to its end by a thin line where it had to move."""
    if not ends:
        return []
    moved = {"expr": "length(hidden) ? 0 : datum.shift"}
    shared = {"data": {"values": list(ends)}, "transform": [VISIBLE]}
    own_color = {**color, "legend": None}
    leader = {"type": "rule", "style": "leader", "xOffset": 6, "x2Offset": 15, "y2Offset": moved}
    mark = {"type": "text", "style": "series-text", "align": "left", "baseline": "middle", "dx": 17}
    return [
        {
            **shared,
            "mark": leader,
            "encoding": {"x": x, "x2": {"field": "label_x"}, "y": y, "y2": {"field": "y"}, "color": own_color},
        },
        {
            **shared,
            "mark": {**mark, "limit": WIDEST_PIXELS, "dy": moved},
            "encoding": {"x": {**x, "field": "label_x"}, "y": y, "text": {"field": "setting"}, "color": own_color},
        },
    ]
