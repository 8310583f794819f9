"""The files in which a training run records its loss curve and its commands, and the error for a full disk."""

import contextlib
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.fingerprint.parts import installed_version
from sbeval.foreign_files import MOST_RESULTS_BYTES, fits, parse_json, read_bytes
from sbeval.keeping.writing import whole_file
from sbeval.processes.ending import no_room

OTHER_FOLDER = "choose another --out, with space, that you may write to"
COMMANDS_FILE = "runs.jsonl"
CURVE_FILE = "training_log.jsonl"
COMPLETE_MARK = "complete.json"
"""File in a state's folder that marks the state as completely written."""
# types of the fields that this module reads from each file
_KINDS: dict[str, dict[str, Any]] = {
    COMMANDS_FILE: {"command": str, "last_step": int, "seconds": float, "gpu": str | None},
    CURVE_FILE: {"step": int},
}
_PACKAGES = ("torch", "triton", "transformers", "accelerate", "tokenizers", "numpy")


def write_lines(file: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """Writes JSON lines atomically."""
    with whole_file(file, "the record of a run", remedy=OTHER_FOLDER) as unfinished:
        unfinished.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Reads the JSON lines that a run wrote; a missing file has no lines.

    An incomplete last line is dropped: the process may have been killed, or the disk full, while it was written.

    Raises:
        UserError: the file cannot be read, or a line is not one that a run writes.
    """
    values: list[dict[str, Any]] = []
    kinds = _KINDS[file.name].items()
    try:
        for line in read_bytes(file, MOST_RESULTS_BYTES).split(b"\n")[:-1] if file.exists() else []:
            value = parse_json(line)
            if not fits(value, dict) or not all(fits(value.get(name), kind) for name, kind in kinds):
                raise UserError("fields are missing or have other types")
            values.append(value)
    except UserError as error:
        raise UserError(
            f"Line {len(values) + 1} of {file} is not one that a training run writes ({error}); correct or remove it"
        ) from None
    return values


def trim_log(log: Path, last_step: int) -> None:
    """Drops points of the loss curve after `last_step`: a resumed run repeats these steps and logs them again."""
    if log.is_file():
        write_lines(log, [point for point in read_lines(log) if point["step"] <= last_step])


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of the packages that a training run depends on; None for a missing package."""
    return {"python": platform.python_version()} | {name: installed_version(name) for name in _PACKAGES}


@contextlib.contextmanager
def full_disk_named(out: Path) -> Iterator[None]:
    """Inside the block, turns any library's error about a full disk into a `UserError` that names the run's folder."""
    try:
        yield
    except Exception as error:
        if not no_room(error):
            raise
        saved = any((out / "states").glob(f"checkpoint-*/{COMPLETE_MARK}"))
        last_state = "the run resumes from its last state" if saved else "no state had been saved before"
        raise UserError(
            f"The disk is full: no state could be written to {out}; free space and run the same command: {last_state}"
        ) from error
