"""Stored results of context extension: training that takes a GPU a minute takes a CPU hours, so the demo shows them.

The archive holds lm-eval's own result and samples files of the two small models of `docs/results/extrapolation` before
and after extension to four times their training length.
"""

import importlib.resources
import tarfile
from pathlib import Path

from sbeval.corpora import archives

TITLE = "Before and after context extension from 1K to 4K (stored results of an NVIDIA H200, not of this machine)"
LABELS = {
    "scheme_stickbreaking": "stick-breaking",
    "scheme_stickbreaking_extended": "stick-breaking, extended",
    "scheme_rope": "RoPE dynamic:4",
    "scheme_rope_extended": "RoPE dynamic:4, extended",
}
"""How the page names the models; `dynamic:4` is a setting of the evaluation before extension, and trained in after."""


def unpack(folder: Path) -> Path:
    """Writes the stored results below a folder, which is made where it is missing, and returns it."""
    archive = importlib.resources.files("sbeval.demo") / "extension.tar.xz"
    with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:xz") as packed:
        archives.unpack(packed, folder)
    return folder
