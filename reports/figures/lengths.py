"""The length axis of a figure: in tokens, or in multiples of each model's training length or declared length.

Every data row of a figure has its position on each of these axes, in fields such as `x` (tokens), `x_training` and
`x_declared`. `usermeta.axes` of the specification holds the definitions of the axes. `onAxis` in the page's script and,
for image files, `on_axis` switch a figure to another axis in the same way.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.reports.figures.theme import Look

UNITS = {"training": "training length", "declared": "declared length"}
"""Units of the length axis besides tokens: key in specifications to the unit's name on the page."""
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
    """Returns title, scale and axis of Vega-Lite's x channel: logarithmic, with labels at powers of two.

    Args:
        title: title of the axis; "(tokens," in it is replaced for an axis in multiples of a length.
        domain: ends of the axis.
        octaves: octaves between neighbouring labels; if None, one, or two on a long axis.
        unit: a key of `UNITS`; empty for tokens.
    """
    low, high = domain
    powers = [2.0**power for power in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    step = octaves or (1 if len(powers) <= 10 else 2)
    unit_text = f"(multiples of the {UNITS[unit]}," if unit else "(tokens,"
    return {
        "title": title and title.replace("(tokens,", unit_text),
        "scale": {"type": "log", "base": 2, "domain": [low, high], "nice": False},
        "axis": {
            "values": powers[::-1][::step][::-1],
            "labelExpr": _IN_UNITS if unit else _IN_TOKENS,
            "labelFlush": False,
            "labelOverlap": "parity",
        },
    }


def units_shown(looks: Mapping[str, Look]) -> list[str]:
    """Returns the units (keys of `UNITS`) that the length axis of a figure with these models offers besides tokens.

    "declared" is among them only if some model's declared length differs from its training length.
    """
    training, declared = ({label: look.units.get(unit) for label, look in looks.items()} for unit in UNITS)
    units = []
    if any(training.values()):
        units.append("training")
    if declared != training:
        units.append("declared")
    return units


def places(look: Look, tokens: float, units: Sequence[str], name: str = "x") -> dict[str, float | None]:
    """Returns the position of a length on the axes in other units: `NAME_UNIT` to a multiple of the model's length.

    The position is None if the model's training or declared length is unknown.
    """
    return {f"{name}_{unit}": tokens / length if (length := look.units.get(unit)) else None for unit in units}


def unit_channels(
    rows: Sequence[Mapping[str, Any]], title: str | None, octaves: int | None, units: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Returns unit to the x channel of the axis in that unit; its domain includes one and the positions of all rows."""
    channels = {}
    for unit in units:
        if known := [row[f"x_{unit}"] for row in rows if row[f"x_{unit}"]]:
            low, high = min(1.0, *known), max(1.0, *known)
            channels[unit] = length_channel(title, (low, high) if low < high else (0.5, 2.0), octaves, unit)
    return channels


def axes_of(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns unit to the x channel of the axis in that unit, as stored in a figure's specification."""
    axes: dict[str, dict[str, Any]] = spec.get("usermeta", {}).get("axes", {})
    return axes


def on_axis(spec: Mapping[str, Any], unit: str) -> Mapping[str, Any]:
    """Returns the specification with its length axis in another unit; unchanged if it has no axis in that unit."""
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
