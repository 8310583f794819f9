"""A process that turns figures into image files; run by file, so that it starts without the rest of the package.

Each line on standard input is a JSON object: `spec`, a file with the Vega-Lite specification; `config` and `version`
for Vega-Lite; `svg`, the file to write; and `images`, further files to write, .png or .pdf. Each is answered by a line
of JSON: an empty text, or what went wrong. `fit` of an image for print holds the width that the whole figure takes in
the specification's units, and the points that these are printed as.
"""

import ctypes
import json
import math
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vl_convert

_MOST_PIXELS = 3_000_000
_NARROWEST_PLOT = 60
_SIZE = re.compile(r'<svg([^>]*) width="([\d.]+)" height="([\d.]+)"')
_PR_SET_PDEATHSIG = 1
_PRIVATE_USE = range(0xE000, 0xF900)


def draw(job: Mapping[str, Any]) -> None:
    """Writes the image files of one figure.

    Raises:
        ValueError: the specification is wrong, or an ending is neither .png nor .pdf.
    """
    text, letters = _in_16_bits(Path(job["spec"]).read_text(encoding="utf-8"))
    spec = json.loads(text)
    svg = str(vl_convert.vegalite_to_svg(spec, vl_version=job["version"], config=job["config"]))
    if fit := job.get("fit"):
        # what axes and names take beside the plots does not change with the plots' width
        room = (fit[0] - _size(svg)[0]) / min(len(spec.get("concat", [spec])), spec.get("columns", 1))
        for plot in _plots(spec):
            plot["width"] = max(_NARROWEST_PLOT, plot["width"] + room)
        svg = str(vl_convert.vegalite_to_svg(spec, vl_version=job["version"], config=job["config"]))
        width, height = _size(svg)
        svg = _SIZE.sub(f'<svg\\1 width="{fit[1]:g}" height="{height * fit[1] / width:g}"', svg, count=1)
    svg = svg.translate(letters)
    Path(job["svg"]).write_text(svg, encoding="utf-8")
    for name in job["images"]:
        path = Path(name)
        if path.suffix == ".png":
            path.write_bytes(vl_convert.svg_to_png(svg, scale=pixel_scale(svg)))
        elif path.suffix == ".pdf":
            path.write_bytes(vl_convert.svg_to_pdf(svg))
        else:
            raise ValueError(f"expected png, svg or pdf, got {path.suffix!r}")


def _in_16_bits(text: str) -> tuple[str, dict[int, str]]:
    """Returns a text with letters of private use in place of those beyond 16 bits, and what turns these back.

    Vega cuts a name that is too wide by 16-bit units, and fails to measure half an emoji.
    """
    used = {*text}
    beyond = sorted(letter for letter in used if ord(letter) > 0xFFFF)
    free = [letter for letter in map(chr, _PRIVATE_USE) if letter not in used]
    known = dict(zip(beyond, free, strict=False))  # more of them than that are no text
    back = {ord(private): letter for letter, private in known.items()}
    return text.translate({ord(letter): known.get(letter, "\N{REPLACEMENT CHARACTER}") for letter in beyond}), back


def pixel_scale(svg: str) -> float:
    """Returns pixels a unit: two, or fewer where an image would be too large to open."""
    width, height = _size(svg)
    area = width * height
    return 2.0 if area * 4 <= _MOST_PIXELS else max(0.5, math.sqrt(_MOST_PIXELS / area))


def _size(svg: str) -> tuple[float, float]:
    size = _SIZE.match(svg)
    return (float(size[2]), float(size[3])) if size else (0.0, 0.0)


def _plots(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns everything that has a width of its own, one for each image of a row."""
    return [piece for image in spec.get("concat", [spec]) for piece in image.get("vconcat", [image])]


def main() -> None:
    """Draws what standard input names until it ends, or until the process that asks is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for line in sys.stdin:
        answer = ""
        try:
            draw(json.loads(line))
        except Exception as error:  # the process that asked raises it again
            answer = f"{type(error).__name__}: {error}"
        try:
            print(json.dumps(answer), flush=True)
        except BrokenPipeError:  # nobody is left to be answered
            os._exit(1)


if __name__ == "__main__":
    main()
