"""Pieces of HTML; every text from outside goes through `text` or an attribute of `element`."""

import html
from collections.abc import Iterable, Mapping

VOID = {"input", "img", "br"}
_DIRECTION_MARKS = dict.fromkeys([0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)])


class Markup(str):
    """A string that is HTML already."""


def text(value: object) -> Markup:
    """Escapes a text and drops marks that would turn the writing direction; a `Markup` passes as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(str(value).translate(_DIRECTION_MARKS), quote=True))


def name(value: object) -> Markup:
    """Escapes a name and isolates its writing direction, so that a right-to-left name cannot turn the sentence."""
    return Markup(f"<bdi>{text(value)}</bdi>")


def element(tag: str, *children: object, attributes: Mapping[str, object] | None = None) -> Markup:
    """Returns an element; children that are not `Markup` are escaped, attributes that are None are left out."""
    written = "".join(f' {key}="{text(str(value))}"' for key, value in (attributes or {}).items() if value is not None)
    if tag in VOID:
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{join(children)}</{tag}>")


def join(parts: Iterable[object], separator: str = "") -> Markup:
    """Joins parts, escaping those that are not `Markup`."""
    return Markup(separator.join(text(part) for part in parts))


def table(
    header: Iterable[object],
    rows: Iterable[Iterable[object]],
    *,
    caption: str,
    explanation: str = "",
    kind: str | None = None,
) -> Markup:
    """Returns a table with a caption and scoped headers; a cell may be a ready `<td>`."""
    head = element("tr", *[element("th", cell, attributes={"scope": "col"}) for cell in header])
    body = []
    for row in rows:
        first, *rest = row
        cells = [cell if isinstance(cell, Markup) and cell.startswith("<td") else element("td", cell) for cell in rest]
        body.append(element("tr", element("th", first, attributes={"scope": "row"}), *cells))
    title = element("caption", caption, element("span", explanation) if explanation else "")
    content = element("table", title, element("thead", head), element("tbody", *body), attributes={"class": kind})
    return element(
        "div", content, attributes={"class": "scroll", "tabindex": "0", "role": "region", "aria-label": caption}
    )
