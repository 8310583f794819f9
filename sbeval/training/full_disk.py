"""A full disk, told in one sentence whichever library met it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sbeval.commands.ending import no_room
from sbeval.errors import UserError

COMPLETE_MARK = "complete.json"
"""Lies in a state that was written to its end."""


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
