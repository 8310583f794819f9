"""Writes a Vega-Lite figure as PNG, with the colours and the font of report images."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vl_convert

from sbeval.reports.figures.images import IMAGE_CONFIG, VEGA_LITE


def write_png(spec: Mapping[str, Any], file: Path) -> None:
    """Writes the figure of a Vega-Lite specification to `file`, whose folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(vl_convert.vegalite_to_png(json.dumps(spec), vl_version=VEGA_LITE, config=IMAGE_CONFIG, scale=2))
