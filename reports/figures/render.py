"""Image files from a figure's specification: PNG, SVG and PDF, without a browser or a network."""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import vl_convert

from sbeval.reports.figures.theme import LIGHT, vega_config

VEGA_LITE = "6.4"
_MOST_PIXELS = 12_000_000
_GLOBALS = "window.vegaEmbed = vegaEmbed; window.vega = vega; window.vegaLite = vegaLite;"
_END = "\n//end\n"
IMAGE_FONT = "Liberation Sans, Arial, sans-serif"


def still(spec: Mapping[str, Any]) -> str:
    """Returns the figure as SVG text on white."""
    config = vega_config(LIGHT, font=IMAGE_FONT) | {"background": LIGHT["paper"]}
    return str(vl_convert.vegalite_to_svg(_without_pointer(dict(spec)), vl_version=VEGA_LITE, config=config))


def _without_pointer(spec: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what only answers a pointer: the invisible targets, tooltips and the point under it."""
    still = dict(spec)
    if "concat" in spec:
        still["concat"] = [_without_pointer(part) for part in spec["concat"]]
    if "layer" in spec:
        still["layer"] = [_unhovered(layer) for layer in spec["layer"] if "params" not in layer]
    return still


def _unhovered(layer: dict[str, Any]) -> dict[str, Any]:
    size = layer["encoding"].get("size", {})
    if "condition" not in size:
        return layer
    return {**layer, "encoding": {**layer["encoding"], "size": {"value": size["value"]}}}


def write_images(svg: str, stem: Path, formats: Iterable[str] = ("png", "svg", "pdf")) -> list[Path]:
    """Writes the still figure as `stem.png`, `stem.svg` and `stem.pdf` and returns the paths."""
    written = []
    for kind in formats:
        path = stem.with_name(f"{stem.name}.{kind}")
        if kind == "svg":
            path.write_text(svg, encoding="utf-8")
        elif kind == "png":
            path.write_bytes(vl_convert.svg_to_png(svg, scale=_scale(svg)))
        elif kind == "pdf":
            path.write_bytes(vl_convert.svg_to_pdf(svg))
        else:
            raise ValueError(f"expected png, svg or pdf, got {kind!r}")
        written.append(path)
    return written


def _scale(svg: str) -> float:
    """Pixels a unit: two, or fewer for a picture too large to open."""
    size = re.match(r'<svg[^>]* width="([\d.]+)" height="([\d.]+)"', svg)
    area = float(size[1]) * float(size[2]) if size else 0.0
    return 2.0 if area * 4 <= _MOST_PIXELS else max(0.5, math.sqrt(_MOST_PIXELS / area))


@lru_cache(maxsize=1)
def javascript() -> str:
    """Returns Vega, Vega-Lite and vega-embed as one script to be embedded in the page.

    Bundling takes seconds, so the result is kept in the user's cache folder for the next report.
    """
    name = f"vega-{VEGA_LITE}-vl-convert-{version('vl-convert-python')}.js"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sbeval" / name
    with contextlib.suppress(OSError, UnicodeError):
        text = cache.read_text(encoding="utf-8")
        if text.endswith(_END):
            return text
    text = str(vl_convert.javascript_bundle(_GLOBALS, vl_version=VEGA_LITE)) + _END
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_name(f"{name}.{os.getpid()}")
        partial.write_text(text, encoding="utf-8")
        partial.replace(cache)
    return text


def script_json(value: object) -> str:
    """Writes JSON that is safe inside a `<script>` element, whatever text it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
