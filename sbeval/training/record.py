"""What a training run leaves behind: its loss curve, its commands, and the record beside the checkpoint.

A full disk is told in one sentence whichever library met it.
"""

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
"""Lies in a state that was written to its end."""
_KINDS: dict[str, dict[str, Any]] = {  # of what is read again
    COMMANDS_FILE: {"command": str, "last_step": int, "seconds": float, "gpu": str | None},
    CURVE_FILE: {"step": int},
}
_PACKAGES = ("torch", "triton", "transformers", "accelerate", "tokenizers", "numpy")


def write_lines(file: Path, values: Sequence[Mapping[str, Any]]) -> None:
    """Writes JSON lines, whole or not at all."""
    with whole_file(file, "the record of a run", remedy=OTHER_FOLDER) as unfinished:
        unfinished.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Reads JSON lines of a run, without a last one that was cut off by a kill or a full disk; no file is no lines.

    Raises:
        UserError: it cannot be read, or a line is none that a run wrote.
    """
    values: list[dict[str, Any]] = []
    kinds = _KINDS[file.name].items()
    try:
        for line in read_bytes(file, MOST_RESULTS_BYTES).split(b"\n")[:-1] if file.exists() else []:
            value = parse_json(line)
            if not fits(value, dict) or not all(fits(value.get(name), kind) for name, kind in kinds):
                raise UserError("it is not what a run writes")
            values.append(value)
    except UserError as error:
        raise UserError(
            f"Expected line {len(values) + 1} of {file} as a run wrote it, found another ({error}); mend or remove it"
        ) from None
    return values


def trim_log(log: Path, last_step: int) -> None:
    """Drops points after `last_step`: steps lost in a crash are logged again when they are done again."""
    if log.is_file():
        write_lines(log, [point for point in read_lines(log) if point["step"] <= last_step])


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of the packages that a run's numbers depend on."""
    return {"python": platform.python_version()} | {name: installed_version(name) for name in _PACKAGES}


@contextlib.contextmanager
def full_disk_named(out: Path) -> Iterator[None]:
    """Turns what libraries raise where a disk is full into a `UserError` that names the run's folder."""
    try:
        yield
    except Exception as error:
        if not no_room(error):
            raise
        saved = any((out / "states").glob(f"checkpoint-*/{COMPLETE_MARK}"))
        before = "the run goes on from the state saved before" if saved else "no state had been saved before"
        raise UserError(
            f"Expected room for a state in {out}, found a full disk; make room and run the same command: {before}"
        ) from error
