"""A full disk, told in one sentence whichever library met it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sbeval.errors import UserError

COMPLETE_MARK = "complete.json"
"""Lies in a state that was written to its end."""
_NO_ROOM = ("No space left", "Disk quota exceeded", "inline_container.cc", "PytorchStreamWriter failed")
"""The operating system's words, and those of torch's writer, which a short write surprises at the end of a file."""


@contextlib.contextmanager
def full_disk_named(out: Path) -> Iterator[None]:
    """Turns what libraries raise where a disk is full into a `UserError` that names the run's folder."""
    try:
        yield
    except Exception as error:
        if not _no_room(error):
            raise
        saved = any((out / "states").glob(f"checkpoint-*/{COMPLETE_MARK}"))
        before = "the state saved before is complete and is gone on from" if saved else "no state had been saved before"
        raise UserError(
            f"expected room for a state in {out}, found a full disk; make room and run the same command: {before}"
        ) from error


def _no_room(error: BaseException | None) -> bool:
    """Whether an error says that nothing more could be written; libraries wrap the operating system's in their own."""
    while error is not None:
        if any(words in str(error) for words in _NO_ROOM):
            return True
        error = error.__cause__ or error.__context__
    return False
