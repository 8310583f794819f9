"""Where something is kept between runs, and tables that are kept there."""

import contextlib
import os
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.keeping.writing import whole_file


def cache_folder(content: str) -> Path:
    """Returns where content of a kind is kept: in `SBEVAL_CACHE`, else in Hugging Face's datasets cache."""
    if named := os.environ.get("SBEVAL_CACHE"):
        return local_path(named) / content
    # as `datasets.config` has it, whose import takes a second
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    datasets = os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets"
    return Path(os.path.expanduser(datasets)) / "sbeval" / content


def read_table(path: Path) -> Any | None:
    """Returns the Arrow table that `keep_table` wrote, None where there is none that can be read."""
    import pyarrow as pa  # a third of a second that only readers of tables take

    try:
        with pa.OSFile(str(path)) as file:
            return pa.ipc.open_file(file).read_all()
    except (FileNotFoundError, pa.ArrowInvalid):
        return None


def keep_table(path: Path, table: Any) -> None:
    """Writes an Arrow table; where the folder cannot be written, nothing is kept and nothing is lost but time."""
    import pyarrow as pa  # as in `read_table`

    with (
        contextlib.suppress(UserError),
        whole_file(path, "a table") as new,
        pa.OSFile(str(new), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
