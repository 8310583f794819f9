"""Stored results of context extension, which takes a minute on a GPU and hours on a CPU.

The archive holds lm-eval's results and samples files for the two small models of `docs/results/extrapolation`, before
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
"""Names of the models on the page. Both RoPE models run with `dynamic:4`; only the extended one was trained with it."""


def unpack(folder: Path) -> Path:
    """Extracts the stored results into `folder`, which is created if it is missing, and returns the folder."""
    archive = importlib.resources.files("sbeval.demo") / "extension.tar.xz"
    with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:xz") as packed:
        archives.unpack(packed, folder)
    return folder
