"""Writes a Vega-Lite figure as PNG, with the colours and the font of report images."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import vl_convert

from sbeval.reports.figures.images import IMAGE_FONT
from sbeval.reports.figures.theme import LIGHT, vega_config


def write_png(spec: Mapping[str, Any], file: Path) -> None:
    """Writes the figure of a Vega-Lite specification to `file`, whose folder is made."""
    config = vega_config(LIGHT, font=IMAGE_FONT) | {"background": LIGHT["paper"]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(vl_convert.vegalite_to_png(json.dumps(spec), config=config, scale=2))
