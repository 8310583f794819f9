"""Small multiples: figures of lines side by side, with the same models, marks and colours."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.reports.figures.labels import Row
from sbeval.reports.figures.lines import Axes, line_figure
from sbeval.reports.figures.theme import Look


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One of the figures: its heading, and rows and axes as `line_figure` takes them."""

    name: str
    rows: Sequence[Row]
    axes: Axes


def small_multiples(
    panels: Sequence[Panel],
    *,
    columns: int,
    height: int,
    width: int,
    looks: Mapping[str, Look],
    marks: Mapping[int, str],
    tooltip: Mapping[str, str],
    title: str,
    subtitle: str,
    description: str,
) -> dict[str, Any]:
    """Returns the Vega-Lite specification; `height` and `width` in pixels are of one panel."""
    parts = []
    for number, panel in enumerate(panels):
        spec = line_figure(
            panel.rows,
            axes=panel.axes,
            looks=looks,
            marks=dict.fromkeys(marks, ""),
            tooltip=tooltip,
            title=panel.name,
            subtitle="",
            description=panel.name,
            height=height,
            width=width,
            direct_labels=False,
            hover=f"hover{number}",
            every_look=True,
        )
        kept = {key: spec[key] for key in ("width", "height", "data", "layer")}
        parts.append({"title": {"text": panel.name, "fontSize": 12, "offset": 6}, **kept})
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "title": {"text": title, "subtitle": subtitle},
        "description": description,
        "padding": 6,
        "columns": columns,
        "spacing": {"row": 22, "column": 26},
        "params": [{"name": "hidden", "value": []}],
        "concat": parts,
        "resolve": {"legend": {"color": "shared"}, "scale": {"color": "shared", "shape": "shared"}},
    }
