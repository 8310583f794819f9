"""The cache folder for data that is reused between runs, and Arrow tables in it."""

import contextlib
import os
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.keeping.writing import whole_file


def cache_folder(content: str) -> Path:
    """Returns the cache folder for one kind of content: below `SBEVAL_CACHE`, or else Hugging Face's datasets cache."""
    if folder := os.environ.get("SBEVAL_CACHE"):
        return local_path(folder) / content
    # the same rule as in `datasets.config`, whose import takes a second
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    datasets = os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets"
    return Path(os.path.expanduser(datasets)) / "sbeval" / content


def read_table(path: Path) -> Any | None:
    """Returns the Arrow table that `keep_table` wrote, None if it is missing or damaged."""
    import pyarrow as pa  # the import takes a third of a second

    try:
        with pa.OSFile(str(path)) as file:
            return pa.ipc.open_file(file).read_all()
    except (FileNotFoundError, pa.ArrowInvalid):
        return None


def keep_table(path: Path, table: Any) -> None:
    """Writes an Arrow table to the cache. If the folder cannot be written to, does nothing: the table is made again."""
    import pyarrow as pa  # the import takes a third of a second

    with (
        contextlib.suppress(UserError),
        whole_file(path, "a table") as new,
        pa.OSFile(str(new), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
