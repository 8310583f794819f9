"""Colours, marker shapes and fonts of every figure, for light and dark pages.

Models differ in marker shape as well as in colour, so that colour-blind readers and black-and-white prints tell them
apart.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.reports.read.models import EvaluatedModel

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right", "triangle-left")

# Okabe and Ito's hues, darkened for white and lightened for black until each reads as text (contrast of 4.5 or more).
_HUES: dict[str, tuple[str, str]] = {
    "blue": ("#0067a5", "#5ab4ec"),
    "vermillion": ("#b84600", "#ff9355"),
    "green": ("#00785a", "#3ecfa6"),
    "purple": ("#a0417f", "#e69ac6"),
    "orange": ("#8a6000", "#e8ab2e"),
    "sky": ("#33789c", "#9ad7f5"),
    "grey": ("#5c6166", "#b7bdc4"),
    "olive": ("#6b6b00", "#e3dc62"),
    "crimson": ("#b3284f", "#ff87a5"),
    "indigo": ("#5150b5", "#a5a6ff"),
    "brown": ("#8c4a32", "#d9a184"),
    "teal": ("#00787f", "#4fd0d6"),
}
_SCHEME_HUES = {
    "stickbreaking": "blue",
    "rope": "vermillion",
    "nope": "green",
    "alibi": "purple",
    "fire": "orange",
    "forgetting": "teal",
    "nape": "olive",
    "nape-asentmax": "crimson",
    "rope-asentmax": "sky",
    "rope-ssmax": "indigo",
    "rope-entmax15": "brown",
}

LIGHT = {"ink": "#16191d", "muted": "#5a626b", "grid": "#e6e8eb", "axis": "#b9bfc6", "paper": "#ffffff"}
DARK = {"ink": "#eef0f2", "muted": "#a4adb6", "grid": "#2c3238", "axis": "#4a525a", "paper": "#14171a"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Colours, marker shape and line style with which figures draw one model.

    Attributes:
        light: colour on light pages.
        dark: colour on dark pages.
        shape: Vega's name of the marker shape.
        dashed: whether the model's line is dashed, as it is for a model that another model in the figure extends.
        training_length_tokens: training length at which a vertical line is drawn; None for no line.
        units: key of `lengths.UNITS` (training or declared) to that length of the model in tokens; None if unknown.
    """

    light: str
    dark: str
    shape: str
    dashed: bool = False
    training_length_tokens: int | None = None
    units: Mapping[str, int | None] = dataclasses.field(default_factory=dict)


def choose_looks(models: Sequence[EvaluatedModel]) -> dict[str, Look]:
    """Chooses colours, marker shape and line style of each model; returns model label to `Look`.

    The first model of each position scheme has a fixed colour: in every report stick-breaking is blue and RoPE
    vermillion. The line of a model that was context-extended to make another model is dashed.
    """
    parents = {model.parent for model in models if model.parent}
    hues: dict[str, str] = {}
    for model in models:
        hue = _SCHEME_HUES.get(model.record.attention or "")
        if hue is not None and hue not in hues.values():
            hues[model.label] = hue
    free = [hue for hue in _HUES if hue not in hues.values()] or list(_HUES)
    unnamed = [model.label for model in models if model.label not in hues]
    hues |= {label: free[index % len(free)] for index, label in enumerate(unnamed)}
    looks = {}
    for index, model in enumerate(models):
        facts: dict[str, Any] = {
            "dashed": model.label in parents,
            "training_length_tokens": model.record.training_length_tokens,
        }
        facts["units"] = {"training": model.origin_length_tokens, "declared": model.declared_length_tokens}
        looks[model.label] = _look(index, _HUES[hues[model.label]], **facts)
    return looks


def series_looks(labels: Sequence[str]) -> dict[str, Look]:
    """Returns label to `Look` for figures whose lines are not models but, for example, context lengths."""
    hues = list(_HUES.values())
    return {label: _look(index, hues[index % len(hues)]) for index, label in enumerate(labels)}


def _look(index: int, hue: tuple[str, str], **facts: Any) -> Look:
    return Look(light=hue[0], dark=hue[1], shape=SHAPES[index % len(SHAPES)], **facts)


def within(looks: Mapping[str, Look], labels: Sequence[str], parents: Mapping[str, str]) -> dict[str, Look]:
    """Returns label to `Look` for the models in one figure.

    `parents` maps a context-extended model to the model that was extended. The line of the latter is dashed only if
    the figure shows both.
    """
    dashed = {parents[label] for label in labels if label in parents}
    return {label: dataclasses.replace(looks[label], dashed=label in dashed) for label in looks if label in labels}


def vega_config(colours: dict[str, str], *, font: str = FONT) -> dict[str, Any]:
    """Returns Vega-Lite's `config` with the given colours (`LIGHT` or `DARK`) and font."""
    text = {"labelColor": colours["muted"], "titleColor": colours["ink"], "labelFont": font, "titleFont": font}
    muted = {"stroke": colours["muted"], "color": colours["muted"]}
    return {
        "background": "transparent",
        "font": font,
        "view": {"stroke": None},
        "axis": {
            **text,
            "gridColor": colours["grid"],
            "domainColor": colours["axis"],
            "tickColor": colours["axis"],
            "labelFontSize": 12.5,
            "titleFontSize": 13,
            "titleFontWeight": 500,
            "titlePadding": 10,
            "labelPadding": 6,
        },
        "axisX": {"grid": False},
        "axisY": {"domain": False, "ticks": False},
        "legend": {**text, "labelFontSize": 12.5, "titleFontSize": 13, "titleFontWeight": 500},
        "title": {
            "color": colours["ink"],
            "subtitleColor": colours["muted"],
            "font": font,
            "subtitleFont": font,
            "fontSize": 14,
            "subtitleFontSize": 13,
            "fontWeight": 600,
            "anchor": "start",
            "offset": 14,
        },
        "style": {
            "mark-line": {**muted, "strokeWidth": 1, "strokeDash": [2, 3]},
            "mark-text": {"fill": colours["muted"], "color": colours["muted"], "fontSize": 12, "font": font},
            "series-text": {"fontSize": 13, "font": font, "fontWeight": 500},
            "leader": {"strokeWidth": 0.75, "opacity": 0.6},
            "zero-line": {**muted, "strokeWidth": 1},
            "heat-cell": {"stroke": None},
            "ink-line": {"stroke": colours["ink"], "color": colours["ink"], "strokeWidth": 1.75},
            "ink-point": {"fill": colours["ink"], "color": colours["ink"], "opacity": 1},
            "ink-text": {"fill": colours["ink"], "fontSize": 12, "font": font},
        },
    }


def dark_colours() -> dict[str, str]:
    """Returns a mapping from each colour on light pages to the colour that replaces it on dark pages."""
    return dict(_HUES.values())
