"""Names at the ends of lines, moved apart until none covers another."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_LABEL_HEIGHT_PIXELS = 15.0
_BESIDE_OWN_END_AT_MOST = 6
LETTER_PIXELS = 6.9
WIDEST_PIXELS = 260.0


def end_labels(
    rows: Sequence[Mapping[str, Any]],
    order: Sequence[str],
    y_scale: str,
    height_pixels: float,
    y_domain: tuple[float, float] | None,
) -> list[dict[str, Any]]:
    """Returns the last measured point of every line, with where its name goes.

    `shift` is how many pixels the name moves down; `label_x` is where along the axis it stands: at the line's own end,
    or, among many lines, in one column at the longest.
    """
    measured = [row for row in rows if row["y"] is not None]
    last: dict[str, Mapping[str, Any]] = {}
    for row in measured:
        if row["setting"] not in last or row["x"] > last[row["setting"]]["x"]:
            last[row["setting"]] = row
    drawn = math.log if y_scale == "log" else float
    values = [drawn(row["y"]) for row in measured] if y_domain is None else [drawn(end) for end in y_domain]
    if not values:
        return []
    span = (max(values) - min(values)) or 1.0
    heights = {
        label: height_pixels * (max(values) - drawn(last[label]["y"])) / span for label in order if label in last
    }
    placed = spread(heights, min(_LABEL_HEIGHT_PIXELS, height_pixels / max(1, len(heights))))
    longest = max(last[label]["x"] for label in heights)
    return [
        {
            **last[label],
            "label_x": longest if len(heights) > _BESIDE_OWN_END_AT_MOST else last[label]["x"],
            "shift": placed[label] - heights[label],
        }
        for label in heights
    ]


def spread(heights: Mapping[str, float], label_height: float = _LABEL_HEIGHT_PIXELS) -> dict[str, float]:
    """Moves heights (pixels from the top) at least a label apart; names that collide share their mean height."""
    groups: list[tuple[list[str], float]] = []
    for label in sorted(heights, key=lambda label: heights[label]):
        groups.append(([label], heights[label]))
        while len(groups) > 1 and _overlap(groups[-2], groups[-1], label_height):
            (later, later_middle), (earlier, earlier_middle) = groups.pop(), groups.pop()
            count = len(earlier) + len(later)
            groups.append((earlier + later, (earlier_middle * len(earlier) + later_middle * len(later)) / count))
    return {
        label: middle + (index - (len(labels) - 1) / 2) * label_height
        for labels, middle in groups
        for index, label in enumerate(labels)
    }


def label_room(ends: Sequence[Mapping[str, Any]], x_domain: tuple[int, int], width_pixels: float) -> int:
    """Returns the pixels the names need right of the plot, beyond the octaves their lines leave free."""
    low, high = x_domain
    octave = width_pixels / max(1.0, math.log2(high / low))
    needed = 12.0
    for row in ends:
        text = min(WIDEST_PIXELS, LETTER_PIXELS * len(row["setting"])) + 26
        needed = max(needed, text - octave * math.log2(high / row["label_x"]))
    return round(needed)


def _overlap(earlier: tuple[list[str], float], later: tuple[list[str], float], label_height: float) -> bool:
    reach = (len(earlier[0]) + len(later[0])) * label_height / 2
    return later[1] - earlier[1] < reach
