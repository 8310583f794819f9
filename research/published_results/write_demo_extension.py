"""Writes the stored results that the demo shows beside its own: four models before and after context extension.

python -m research.published_results.write_demo_extension docs/results/extrapolation/results.tar.xz
"""

import json
import sys
import tarfile
import tempfile
from pathlib import Path

from research.published_results.figures import EXTENSION
from research.published_results.found import FIXED, STREAM
from sbeval.corpora.archives import unpack

TARGET = Path(__file__).parents[2] / "sbeval" / "demo" / "extension.tar.xz"


def chosen(folder: Path) -> list[Path]:
    """The result and samples files of both protocols, below an unpacked archive."""
    files = []
    for scheme in EXTENSION:
        for file in sorted(folder.glob(f"results/scheme_{scheme}/*/results_*.json")):
            for task in json.loads(file.read_text(encoding="utf-8"))["results"]:
                if task in (STREAM, FIXED):
                    files += [file, file.with_name(f"samples_{task}_{file.stem.removeprefix('results_')}.jsonl")]
    return files


def main(archive: Path, target: Path = TARGET) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tarfile.open(archive) as packed:
            unpack(packed, Path(folder))
        with tarfile.open(target, "w:xz", preset=9) as out:
            for file in chosen(folder):
                entry = out.gettarinfo(file, str(file.relative_to(folder / "results")))
                entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname, entry.mode = 0, 0, 0, "", "", 0o644
                with file.open("rb") as content:
                    out.addfile(entry, content)
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
