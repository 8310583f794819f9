"""Texts in a figure: caption, tooltip, labels of reference lines, and names at the ends of lines, without overlap."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sbeval.reports.figures.lengths import UNITS
from sbeval.reports.read.fields import length_text

_LABEL_HEIGHT_PIXELS = 15.0
_BESIDE_OWN_END_AT_MOST = 6
WIDEST_PIXELS = 260.0
SYMLOG_CONSTANT = 0.05
_TICKS = 6
_STEPS = ((10, 50), (5, 10), (2, 2))
Row = dict[str, Any]
VISIBLE = {"filter": "indexof(hidden, datum.setting) < 0"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Caption:
    """The texts about a figure.

    Attributes:
        title: title, without a full stop.
        finding: the figure's result in one sentence; it is also the alternative text for screen readers.
        explanation: how to read the figure; shown on the page.
        subtitle: how to read the figure; shown in the image files. If None, these show the explanation.
    """

    title: str
    finding: str
    explanation: str = ""
    subtitle: str | None = None

    @property
    def vega(self) -> dict[str, Any]:
        """The schema, title and description of the figure's Vega-Lite specification."""
        return {
            "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
            "title": {"text": self.title, "subtitle": self.explanation if self.subtitle is None else self.subtitle},
            "description": f"{self.title}. {self.finding}",
        }


def tooltip_fields(fields: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns Vega-Lite's tooltip channel. `fields` maps a field of data rows to the name shown in the tooltip."""
    return [{"field": field, "type": "nominal", "title": title} for field, title in fields.items()]


def end_labels(
    rows: Sequence[Row],
    order: Sequence[str],
    y_scale: str,
    height_pixels: float,
    y_domain: tuple[float, float] | None,
    units: Sequence[str] = (),
) -> list[Row]:
    """Returns the last measured point of every line, with the position of the line's name.

    Two fields are added. `shift` is the number of pixels by which the name is moved down from the point. `label_x` is
    the position of the name along the x axis: the end of its line, or, in a figure with more than six lines, the end of
    the longest line.

    Args:
        rows: points with `setting`, `x`, `y`, and optionally the ends of their intervals.
        order: labels of the lines to name.
        y_scale: "linear", "log" or "symlog".
        height_pixels: height of the plot.
        y_domain: fixed ends of the y axis; if None, Vega chooses them.
        units: units of other x axes (keys of `lengths.UNITS`); for each a field `label_x_UNIT` is added too.
    """
    measured = [row for row in rows if row["y"] is not None and (y_scale != "log" or row["y"] > 0)]
    if not measured:
        return []
    last = {row["setting"]: row for row in sorted(measured, key=lambda row: row["x"])}
    transforms: dict[str, Callable[[float], float]] = {"log": math.log, "symlog": symlog}
    drawn = transforms.get(y_scale, float)
    values = [row[key] for row in measured for key in ("y", "low", "high", "seed_low", "seed_high") if key in row]
    drawable = [value for value in values if value is not None and (y_scale != "log" or value > 0)]
    low, high = nice_domain(min(drawable), max(drawable), y_scale) if y_domain is None else y_domain
    span = (drawn(high) - drawn(low)) or 1.0
    last_values = {label: last[label]["y"] for label in order if label in last}
    heights = {label: height_pixels * (drawn(high) - drawn(y)) / span for label, y in last_values.items()}
    placed = within_plot(spread(heights), height_pixels)
    longest = max(last[label]["x"] for label in heights)
    column = {"label_x": longest} if len(heights) > _BESIDE_OWN_END_AT_MOST else {}
    ends = [
        {**last[label], "label_x": last[label]["x"], **column, "shift": placed[label] - heights[label]}
        for label in heights
    ]
    for unit in units:
        longest = max((end[f"x_{unit}"] or 0 for end in ends), default=0)
        for end in ends:
            end[f"label_x_{unit}"] = end[f"x_{unit}"] and (longest if column else end[f"x_{unit}"])
    return ends


def symlog(value: float) -> float:
    """Transforms a value as Vega's symlog scale does: linear around zero, logarithmic away from it."""
    return math.copysign(math.log1p(abs(value) / SYMLOG_CONSTANT), value)


def nice_domain(low: float, high: float, y_scale: str) -> tuple[float, float]:
    """Returns the ends that Vega's option `nice` gives an axis for values from `low` to `high`.

    The ends are multiples of 1, 2 or 5 times a power of ten; on a log scale they are powers of ten.
    """
    if y_scale == "log":
        return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
    step = (high - low) / _TICKS
    if step <= 0:
        return low, high
    power = 10.0 ** math.floor(math.log10(step))
    # as in d3: the factor is 10, 5 or 2 if the ratio is at least the square root of 50, 10 or 2, else 1
    step = power * next((factor for factor, least in _STEPS if step / power >= math.sqrt(least)), 1)
    return math.floor(low / step) * step, math.ceil(high / step) * step


def within_plot(heights: Mapping[str, float], height_pixels: float) -> dict[str, float]:
    """Moves names up that would overlap the x axis below the plot, and then names that the moved ones would cover.

    Heights, in the argument and in the returned dictionary, are pixels from the top of the plot.
    """
    placed: dict[str, float] = {}
    lowest = height_pixels - _LABEL_HEIGHT_PIXELS / 3
    for label in sorted(heights, key=lambda label: heights[label], reverse=True):
        placed[label] = min(heights[label], lowest)
        lowest = placed[label] - _LABEL_HEIGHT_PIXELS
    return placed


def spread(heights: Mapping[str, float], label_height: float = _LABEL_HEIGHT_PIXELS) -> dict[str, float]:
    """Moves names apart until they are at least `label_height` pixels from each other.

    Names that are too close form a group, which is centred on the mean of their heights. Heights are pixels from the
    top of the plot.
    """
    groups: list[tuple[list[str], float]] = []
    for label in sorted(heights, key=lambda label: heights[label]):
        groups.append(([label], heights[label]))
        while len(groups) > 1:
            (earlier, earlier_middle), (later, later_middle) = groups[-2:]
            count = len(earlier) + len(later)
            if later_middle - earlier_middle >= count * label_height / 2:
                break
            middle = (earlier_middle * len(earlier) + later_middle * len(later)) / count
            groups[-2:] = [(earlier + later, middle)]
    return {
        label: middle + (index - (len(labels) - 1) / 2) * label_height
        for labels, middle in groups
        for index, label in enumerate(labels)
    }


def vertical_marks(lengths: Sequence[int], x: Row, units: Sequence[str], *, worded: bool) -> list[Row]:
    """Returns layers with a dotted vertical line at every training length, and its label above the plot.

    Labels are in three rows, so that neighbours do not touch. On an axis in multiples of the training or declared
    length, all lines are at one, and only the first has a label.

    Args:
        lengths: training lengths in tokens.
        x: Vega-Lite's x channel.
        units: units of other x axes (keys of `lengths.UNITS`).
        worded: whether the lines have labels.
    """
    if not lengths:
        return []
    first = x["scale"]["domain"][0]
    words = [f"trained at {length_text(length)}" if worded else "" for length in lengths]
    places = enumerate(zip(lengths, words, strict=True))
    rows = [{"x": length, "text": text, "row": row % 3, "first": length == first} for row, (length, text) in places]
    for row, unit in itertools.product(rows, units):
        row |= {f"x_{unit}": 1, f"text_{unit}": UNITS[unit] if worded and row is rows[0] else ""}
    # centred at the start of the x axis, a label would cover the topmost label of the y axis
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


def level_lines(levels: Mapping[float, str], y: Row, *, start: float | None = None) -> list[Row]:
    """Returns layers with a horizontal line at each y value in `levels`, and its label unless that is empty.

    Lines of models begin near the level `start`, if there is one, so its label is at the right end.
    """
    if not levels:
        return []
    rows = [{"y": value, "text": text, "right": value == start} for value, text in levels.items()]
    rule = {"data": {"values": rows}, "mark": {"type": "rule", "style": "zero-line"}, "encoding": {"y": y}}
    # the label of a single level is below it, away from the labels above the plot
    baseline, dy = ("top", 4) if start is None and len(levels) == 1 else ("bottom", -4)
    texts = [
        {
            "data": {"values": worded},
            "mark": {"type": "text", "style": "mark-text", "align": align, "baseline": baseline, "dx": dx, "dy": dy},
            "encoding": {"x": {"value": place}, "y": y, "text": {"field": "text"}},
        }
        for right, align, dx, place in ((False, "left", 4, 0), (True, "right", 0, "width"))
        if (worded := [row for row in rows if row["text"] and row["right"] == right])
    ]
    return [rule, *texts]


def line_names(ends: Sequence[Row], x: Row, y: Row, color: Row) -> list[Row]:
    """Returns layers with the models' names beside the ends of their lines, and a thin line from each end to its name.

    The layers read the data set `ends` of the specification. The page's script replaces this data set when lines are
    hidden or the plot is resized.
    """
    if not ends:
        return []
    moved = {"expr": "datum.shift"}
    shared = {"data": {"name": "ends"}, "transform": [VISIBLE]}
    line_color = {**color, "legend": None}
    leader = {"type": "rule", "style": "leader", "xOffset": 6, "x2Offset": 15, "y2Offset": moved}
    mark = {"type": "text", "style": "series-text", "align": "left", "baseline": "middle", "dx": 17}
    from_end = {"x": x, "x2": {"field": "label_x"}, "y": y, "y2": {"field": "y"}, "color": line_color}
    beside = {"x": {**x, "field": "label_x"}, "y": y, "text": {"field": "setting"}, "color": line_color}
    return [
        {**shared, "mark": leader, "encoding": from_end},
        {**shared, "mark": {**mark, "limit": WIDEST_PIXELS, "dy": moved}, "encoding": beside},
    ]
