"""A worker process that renders Vega-Lite specifications to image files.

The parent process starts this file by its path and not as a module, so that the rest of the package is not imported.

Each line on standard input is one job, a JSON object with these keys:

- `spec`: path of a file with the Vega-Lite specification
- `config`, `version`: the configuration and the version of Vega-Lite
- `svg`: path of the SVG file to write
- `images`: paths of other files to write, .png or .pdf
- `fit`: None, or, for an image in print, the width of the whole figure in pixels and its width on paper in points

For each job the process writes one line to standard output: a JSON string with the error, empty if there is none.
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
        ValueError: the specification is invalid, or the extension of an image is neither .png nor .pdf.
    """
    text, letters = _in_16_bits(Path(job["spec"]).read_text(encoding="utf-8"))
    spec = json.loads(text)
    svg = str(vl_convert.vegalite_to_svg(spec, vl_version=job["version"], config=job["config"]))
    if fit := job.get("fit"):
        # only plots can be widened, not axes and labels: the missing width is divided among the plots of a row
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
            raise ValueError(f"cannot write an image file {path.suffix!r}: expected .png or .pdf")


def _in_16_bits(text: str) -> tuple[str, dict[int, str]]:
    """Replaces characters beyond 16 bits, such as emoji, by characters from Unicode's private-use area.

    Vega truncates wide labels by UTF-16 code units. It raises an error if it truncates a label within an emoji.

    Returns:
        The text with replacements, and the table for `str.translate` that restores the characters.
    """
    used = {*text}
    beyond = sorted(letter for letter in used if ord(letter) > 0xFFFF)
    free = [letter for letter in map(chr, _PRIVATE_USE) if letter not in used]
    # if there are more such characters than the private-use area has code points, the rest is replaced by U+FFFD
    known = dict(zip(beyond, free, strict=False))
    back = {ord(private): letter for letter, private in known.items()}
    return text.translate({ord(letter): known.get(letter, "\N{REPLACEMENT CHARACTER}") for letter in beyond}), back


def pixel_scale(svg: str) -> float:
    """Returns the number of pixels for each SVG unit: two, or fewer if the image would be too large to open."""
    width, height = _size(svg)
    area = width * height
    return 2.0 if area * 4 <= _MOST_PIXELS else max(0.5, math.sqrt(_MOST_PIXELS / area))


def _size(svg: str) -> tuple[float, float]:
    size = _SIZE.match(svg)
    return (float(size[2]), float(size[3])) if size else (0.0, 0.0)


def _plots(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the single plots of a figure: the sub-specifications that have a `width`."""
    return [piece for image in spec.get("concat", [spec]) for piece in image.get("vconcat", [image])]


def main() -> None:
    """Renders the jobs on standard input until it is closed or the parent process dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for line in sys.stdin:
        answer = ""
        try:
            draw(json.loads(line))
        except Exception as error:  # the parent process raises it again
            answer = f"{type(error).__name__}: {error}"
        try:
            print(json.dumps(answer), flush=True)
        except BrokenPipeError:  # the parent process is gone
            os._exit(1)


if __name__ == "__main__":
    main()
