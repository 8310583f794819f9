"""Assembles the page: one file with its style, scripts, figures and tables, opening offline."""

import base64
import datetime
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from sbeval.reports.analyse.findings import Finding
from sbeval.reports.analyse.overview import HEADER as OVERVIEW_HEADER
from sbeval.reports.analyse.overview import Overview
from sbeval.reports.figures.images import javascript, script_json
from sbeval.reports.figures.theme import DARK, LIGHT, Look, dark_colours, vega_config
from sbeval.reports.sections.section import Figure, Section
from sbeval.reports.write.html import Markup, element, join, name, table, text

_STICKY_AT_MOST = 8
_CARDS_AT_MOST = 6
_SHAPE_PATHS = {
    "circle": '<circle cx="14" cy="6" r="4"/>',
    "square": '<rect x="10.4" y="2.4" width="7.2" height="7.2"/>',
    "triangle-up": '<path d="M14 1.6 18.4 9.6H9.6z"/>',
    "triangle-down": '<path d="M14 10.4 9.6 2.4h8.8z"/>',
    "diamond": '<path d="M14 1 19 6 14 11 9 6z"/>',
    "cross": '<path d="M12.4 1.5h3.2v2.9h2.9v3.2h-2.9v2.9h-3.2V7.6H9.5V4.4h2.9z"/>',
    "triangle-right": '<path d="M10 1.6 18 6 10 10.4z"/>',
    "triangle-left": '<path d="M18 1.6 10 6 18 10.4z"/>',
}


def write_page(
    *,
    title: str,
    built: datetime.datetime,
    overview: Overview,
    findings: Sequence[Finding],
    caveats: Sequence[str],
    sections: Sequence[Section],
    looks: Mapping[str, Look],
    counts: str,
    images: Mapping[str, str],
) -> str:
    """Returns the whole page as text; `images` holds the still figures as SVG, by name."""
    numbered: dict[str, Figure] = {}
    body = [
        _header(title, built, counts, sections),
        element(
            "main",
            _summary(overview, findings, caveats, looks),
            *[_section(part, looks, numbered, images) for part in sections],
        ),
    ]
    figures = {key: {"variants": figure.variants} for key, figure in numbered.items()}
    colours = {look.light: look.dark for look in looks.values()} | dark_colours()
    themes = {"light": vega_config(LIGHT), "dark": vega_config(DARK), "darkOf": colours}
    replacements = {
        "title": text(title),
        "css": _template("page.css") + _series_colours(looks),
        "body": join(body, "\n"),
        "figures": script_json(figures),
        "themes": script_json(themes),
        "vega": javascript().replace("</script", "<\\/script"),
        "script": _template("page.js"),
    }
    page = _template("page.html")
    pieces = []
    while "@@" in page:
        before, marker, page = page.split("@@", 2)
        pieces += [before, replacements[marker]]
    return "".join([*pieces, page])


def _template(file_name: str) -> str:
    return files("sbeval.reports").joinpath("write", "templates", file_name).read_text(encoding="utf-8")


def _series_colours(looks: Mapping[str, Look]) -> str:
    light = "".join(f".s{index}{{--series:{look.light}}}" for index, look in enumerate(looks.values()))
    dark = "".join(f".s{index}{{--series:{look.dark}}}" for index, look in enumerate(looks.values()))
    return f"\n{light}\n@media screen and (prefers-color-scheme: dark) {{{dark}}}\n"


def series_class(label: str, looks: Mapping[str, Look]) -> str | None:
    """Returns the CSS class that holds a model's colour."""
    return f"s{list(looks).index(label)}" if label in looks else None


def _header(title: str, built: datetime.datetime, counts: str, sections: Sequence[Section]) -> Markup:
    links = [element("a", "Summary", attributes={"href": "#summary"})]
    links += [element("a", part.title, attributes={"href": f"#{part.identifier}"}) for part in sections]
    stamp = f"{counts}. Built {built:%d %B %Y, %H:%M} UTC."
    return element(
        "header",
        element("h1", title),
        element("p", stamp, attributes={"class": "quiet"}),
        element("nav", *links, attributes={"class": "contents", "aria-label": "Contents"}),
    )


def _summary(
    overview: Overview, findings: Sequence[Finding], caveats: Sequence[str], looks: Mapping[str, Look]
) -> Markup:
    cards = []
    for finding in findings:
        numbers = [
            element("p", element("b", item.value), element("span", item.meaning), attributes={"class": "big"})
            for item in finding.headlines
        ]
        cards.append(
            element(
                "li",
                element("h3", name(finding.label)),
                element("p", finding.facts, attributes={"class": "facts"}),
                element("div", *numbers, attributes={"class": "figures-row"}) if numbers else "",
                *[element("p", sentence) for sentence in finding.sentences],
                attributes={"class": f"card {series_class(finding.label, looks) or ''}".strip()},
            )
        )
    listed = element("ul", *cards, attributes={"class": "cards"})
    if len(findings) > _CARDS_AT_MOST:
        listed = element("details", element("summary", f"Each of the {len(findings)} models in words"), listed)
    remarks = [element("li", caveat) for caveat in caveats]
    return element(
        "section",
        element("h2", "Summary", attributes={"id": "summary-title"}),
        *[element("p", sentence, attributes={"class": "lead"}) for sentence in overview.sentences],
        _overview_table(overview, looks) if len(findings) > _CARDS_AT_MOST and overview.rows else "",
        listed,
        element("ul", *remarks, attributes={"class": "caveats quiet"}) if remarks else "",
        attributes={"id": "summary", "aria-labelledby": "summary-title"},
    )


def _overview_table(overview: Overview, looks: Mapping[str, Look]) -> Markup:
    rows = []
    for label, *cells in overview.rows:
        dot = element("span", attributes={"class": f"dot {series_class(label, looks) or ''}".strip()})
        rows.append([element("span", dot, name(label)), *cells])
    return table(OVERVIEW_HEADER, rows, caption="On identical targets, side by side", kind="single")


def _section(
    section: Section, looks: Mapping[str, Look], numbered: dict[str, Figure], images: Mapping[str, str]
) -> Markup:
    parts: list[Markup] = [
        element("h2", section.title, attributes={"id": f"{section.identifier}-title"}),
        element("p", section.lead, attributes={"class": "lead"}) if section.lead else Markup(""),
    ]
    if section.metrics or section.legend:
        parts.append(_controls(section, looks))
    if section.figures:
        figures: dict[bool, list[Markup]] = {False: [], True: []}
        for figure in section.figures:
            key = f"f{len(numbered)}"
            numbered[key] = figure
            figures[figure.folded].append(_figure(key, figure, images[figure.image]))
        parts.append(element("div", *figures[False], attributes={"class": "panels"}))
        if figures[True]:
            more = element("summary", f"{len(figures[True])} more")
            parts.append(element("details", more, element("div", *figures[True], attributes={"class": "panels"})))
    parts += section.content
    attributes = {"id": section.identifier, "aria-labelledby": f"{section.identifier}-title"}
    return element("section", *parts, attributes=attributes)


def _controls(section: Section, looks: Mapping[str, Look]) -> Markup:
    parts = []
    if len(section.metrics) > 1:
        choices = [
            element(
                "label",
                element(
                    "input",
                    attributes={"type": "radio", "name": "metric", "value": key, "checked": "" if first == 0 else None},
                ),
                words,
            )
            for first, (key, words) in enumerate(section.metrics.items())
        ]
        legend = element("legend", "Metric", attributes={"class": "visually-hidden"})
        parts.append(element("fieldset", legend, element("div", *choices, attributes={"class": "segmented"})))
    buttons = [
        element(
            "li",
            element(
                "button",
                _swatch(look),
                name(label),
                attributes={
                    "type": "button",
                    "class": series_class(label, looks),
                    "data-series": label,
                    "aria-pressed": "true",
                    "title": "Hide or show this line",
                },
            ),
        )
        for label, look in section.legend.items()
    ]
    parts.append(element("ul", *buttons, attributes={"class": "legend", "aria-label": "Lines shown"}))
    kind = "controls" if len(section.legend) <= _STICKY_AT_MOST else "controls long"
    return element("div", *parts, attributes={"class": kind})


def _swatch(look: Look) -> Markup:
    dash = ' stroke-dasharray="5 3"' if look.dashed else ""
    return Markup(
        f'<svg class="swatch" viewBox="0 0 28 12" aria-hidden="true" fill="currentColor"><line x1="0" y1="6" x2="28" '
        f'y2="6" stroke="currentColor" stroke-width="2"{dash}/>{_SHAPE_PATHS[look.shape]}</svg>'
    )


def _figure(key: str, figure: Figure, svg: str) -> Markup:
    caption = element(
        "figcaption",
        element("h3", figure.title),
        element("p", element("span", figure.finding, attributes={"class": "finding"}), " ", figure.explanation),
    )
    image = element(
        "img",
        attributes={
            "class": "static",
            "alt": f"{figure.title}. {figure.finding}",
            "src": "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode("ascii"),
        },
    )
    links = [
        element("a", path.rpartition(".")[2].upper(), attributes={"href": path, "download": ""})
        for path in figure.downloads
    ]
    return element(
        "figure",
        caption,
        element("div", attributes={"class": "chart", "data-figure": key}),
        image,
        element("div", *links, attributes={"class": "downloads"}),
        attributes={"class": "wide" if figure.wide else None},
    )


def json_text(value: Any) -> str:
    """Writes a recorded value for people."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
