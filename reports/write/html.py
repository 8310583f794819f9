"""Writes the page: one HTML file with style, scripts, figures and tables, which can be opened without a network.

All HTML comes from jinja2 templates, and jinja2 escapes every text. Only values of type `Markup` (style, scripts and
marker shapes) are not escaped.
"""

import base64
import datetime
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from sbeval.reports.figures.images import javascript, script_json
from sbeval.reports.figures.theme import DARK, LIGHT, dark_colours, vega_config
from sbeval.reports.section import Figure, Report

_BUTTONS_AT_MOST = 8
_DIRECTION_MARKS = dict.fromkeys([0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)])
_SHAPES = {
    "circle": Markup('<circle cx="14" cy="6" r="4"/>'),
    "square": Markup('<rect x="10.4" y="2.4" width="7.2" height="7.2"/>'),
    "triangle-up": Markup('<path d="M14 1.6 18.4 9.6H9.6z"/>'),
    "triangle-down": Markup('<path d="M14 10.4 9.6 2.4h8.8z"/>'),
    "diamond": Markup('<path d="M14 1 19 6 14 11 9 6z"/>'),
    "cross": Markup('<path d="M12.4 1.5h3.2v2.9h2.9v3.2h-2.9v2.9h-3.2V7.6H9.5V4.4h2.9z"/>'),
    "triangle-right": Markup('<path d="M10 1.6 18 6 10 10.4z"/>'),
    "triangle-left": Markup('<path d="M18 1.6 10 6 18 10.4z"/>'),
}


def write_page(
    report: Report, *, title: str, built: datetime.datetime, images: Mapping[str, str], axis: str = "tokens"
) -> str:
    """Returns the page's HTML.

    Args:
        report: the report.
        title: heading of the page.
        built: time shown on the page.
        images: `Figure.image` of every figure to its SVG text.
        axis: unit of the length axis in `images`, and on the page until the reader switches it: "tokens" or a key of
            `lengths.UNITS`.
    """
    figures = [figure for section in report.sections for figure in section.figures]
    keys = {id(figure): f"f{index}" for index, figure in enumerate(figures)}
    classes = {label: f"s{index}" for index, label in enumerate(report.looks)}
    colours = {look.light: look.dark for look in report.looks.values()} | dark_colours()

    def data_uri(figure: Figure) -> str:
        return "data:image/svg+xml;base64," + base64.b64encode(images[figure.image].encode()).decode("ascii")

    return (
        environment()
        .get_template("page.html")
        .render(
            report=report,
            title=title,
            axis=axis,
            built=built,
            series=lambda label: classes.get(label, ""),
            key=lambda figure: keys[id(figure)],
            data_uri=data_uri,
            shapes=_SHAPES,
            buttons_at_most=_BUTTONS_AT_MOST,
            style=Markup(_template("page.css")),
            figures=Markup(script_json({keys[id(figure)]: _live(figure) for figure in figures})),
            themes=Markup(script_json({"light": vega_config(LIGHT), "dark": vega_config(DARK), "darkOf": colours})),
            vega=Markup(javascript().replace("</script", "<\\/script")),
            script=Markup(_template("page.js")),
        )
    )


def _live(figure: Figure) -> dict[str, Any]:
    return {"variants": figure.variants, "findings": figure.findings, "finding": figure.caption.finding}


def environment() -> Environment:
    """Returns the jinja2 environment of the templates.

    It escapes every text, and drops Unicode direction marks, which would change the direction of surrounding text.
    """
    return Environment(
        loader=FunctionLoader(_template),
        autoescape=True,
        finalize=_without_direction_marks,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _without_direction_marks(value: object) -> object:
    return value.translate(_DIRECTION_MARKS) if isinstance(value, str) and not isinstance(value, Markup) else value


def _template(name: str) -> str:
    return files("sbeval.reports.write").joinpath("templates", name).read_text(encoding="utf-8")
