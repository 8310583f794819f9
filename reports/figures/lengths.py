"""The axis of lengths: in tokens, or in multiples of each model's training length or of the length it declares.

A row of a figure holds its place on every axis, and the specification what changes with the axis, so that the page
(`onAxis` of its script) and the image files change it alike.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.reports.figures.theme import Look

UNITS = {"training": "training length", "declared": "declared length"}
"""Axes beside that in tokens, by what one is."""
_IN_TOKENS = (
    "datum.value >= 1048576 ? datum.value / 1048576 + 'M' : "
    "datum.value >= 1024 ? datum.value / 1024 + 'K' : datum.value"
)
_IN_UNITS = (
    "datum.value < 1 ? '1/' + 1 / datum.value + '\N{MULTIPLICATION SIGN}' : datum.value + '\N{MULTIPLICATION SIGN}'"
)
_PLACES = ("x", "label_x", "text")


def length_channel(
    title: str | None, domain: tuple[float, float], octaves: int | None, unit: str = ""
) -> dict[str, Any]:
    """Returns what makes a channel a logarithmic axis that names powers of two; `octaves` apart, None to choose."""
    low, high = domain
    powers = [2.0**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    step = octaves or (1 if len(powers) <= 10 else 2)
    words = f"(multiples of the {UNITS[unit]}," if unit else "(tokens,"
    return {
        "title": title and title.replace("(tokens,", words),
        "scale": {"type": "log", "base": 2, "domain": [low, high], "nice": False},
        "axis": {
            "values": powers[::-1][::step][::-1],
            "labelExpr": _IN_UNITS if unit else _IN_TOKENS,
            "labelFlush": False,
            "labelOverlap": "parity",
        },
    }


def units_shown(looks: Mapping[str, Look]) -> list[str]:
    """Returns the axes that these models have; that of declared lengths only where one declares more than it saw."""
    training, declared = ({label: look.units.get(unit) for label, look in looks.items()} for unit in UNITS)
    units = []
    if any(training.values()):
        units.append("training")
    if declared != training:
        units.append("declared")
    return units


def places(look: Look, tokens: float, units: Sequence[str], name: str = "x") -> dict[str, float | None]:
    """Returns where a length of a model stands on each axis, None where the axis' unit is not known."""
    return {f"{name}_{unit}": tokens / length if (length := look.units.get(unit)) else None for unit in units}


def unit_channels(
    rows: Sequence[Mapping[str, Any]], title: str | None, octaves: int | None, units: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns the axes other than that in tokens, from one to the ends of the rows."""
    channels = {}
    for unit in units:
        if known := [row[f"x_{unit}"] for row in rows if row[f"x_{unit}"]]:
            low, high = min(1.0, *known), max(1.0, *known)
            channels[unit] = length_channel(title, (low, high) if low < high else (0.5, 2.0), octaves, unit)
    return channels


def axes_of(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the axes that a figure has beside that in tokens."""
    axes: dict[str, dict[str, Any]] = spec.get("usermeta", {}).get("axes", {})
    return axes


def on_axis(spec: Mapping[str, Any], unit: str) -> Mapping[str, Any]:
    """Returns a figure on another axis; as it is where it has no such axis."""
    channel = axes_of(spec).get(unit)
    if channel is None:
        return spec

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(item) for item in value]
        if not isinstance(value, Mapping):
            return value
        if value.get("field") in _PLACES and "scale" in value:
            return {**value, **channel}
        changed = {key: moved(item) for key, item in value.items()}
        return changed | {name: changed[key] for name in _PLACES if (key := f"{name}_{unit}") in changed}

    changed: dict[str, Any] = moved({key: value for key, value in spec.items() if key != "usermeta"})
    return changed
