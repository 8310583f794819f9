"""What is kept on disk between runs: token counts of pools, and how many units each prompt got.

Files are Arrow tables named by the hash of everything they depend on, written whole and then renamed, so that runs
side by side never see half a file.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_FORMAT = "ruler1"


def cache_folder() -> Path:
    """Returns where tables are kept: `SBEVAL_CACHE`, else a folder in Hugging Face's datasets cache."""
    named = os.environ.get("SBEVAL_CACHE")
    if named:
        return Path(named).expanduser() / "ruler"
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "sbeval" / "ruler"


def cached_counts(digest: str, count: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Returns counts kept under a hash, int64, and makes and keeps them where there are none."""
    path = _path("counts", digest)
    if (table := _read(path)) is not None:
        return np.asarray(table.column("tokens"), dtype=np.int64)
    counts = count()
    _write(path, pa.table({"tokens": counts.astype(np.int32)}))
    return counts


def read_fits(digest: str) -> dict[int, dict[str, Any]]:
    """Returns the kept rows of a task at one length by sample index, empty where there are none."""
    table = _read(_path("fits", digest))
    return {} if table is None else {row["index"]: row for row in table.to_pylist()}


def write_fits(digest: str, rows: Mapping[int, Mapping[str, Any]]) -> None:
    """Keeps rows of a task at one length."""
    _write(_path("fits", digest), pa.Table.from_pylist([dict(rows[index]) for index in sorted(rows)]))


def _path(kind: str, digest: str) -> Path:
    return cache_folder() / f"{_FORMAT}-{kind}-{digest[:32]}.arrow"


def _read(path: Path) -> pa.Table | None:
    try:
        with pa.OSFile(str(path)) as file:
            return pa.ipc.open_file(file).read_all()
    except (FileNotFoundError, pa.ArrowInvalid):
        return None


def _write(path: Path, table: pa.Table) -> None:
    """Writes a table; where the folder cannot be written, nothing is kept and nothing is lost but time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, suffix=".part")
        with os.fdopen(handle, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        os.replace(part, path)
    except OSError:
        return
