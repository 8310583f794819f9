"""Snapshots of folders, to compare them before and after a command."""

import contextlib
import errno
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

Snapshot = dict[str, tuple[int, str]]


def snapshot(folder: Path, *, without: tuple[str, ...] = ("running.lock", "started.txt")) -> Snapshot:
    """Returns size in bytes and sha256 of every file below a folder by its path there; a folder is an entry too."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            found[str(path.relative_to(folder))] = (-1, "folder")
        elif path.name not in without:
            content = path.read_bytes()
            found[str(path.relative_to(folder))] = (len(content), hashlib.sha256(content).hexdigest())
    return found


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[Snapshot]:
    """Checks that a block, refused or not, leaves a folder as it was; gives what lies there."""
    before = snapshot(folder)
    yield before
    assert snapshot(folder) == before


def below(found: Snapshot, folder: str) -> Snapshot:
    """Returns the part of a snapshot below one of its folders."""
    return {name.removeprefix(f"{folder}/"): entry for name, entry in found.items() if name.startswith(f"{folder}/")}


_full: list[tuple[str, int]] = []
_made: list[str] = []


def _refuse(event: str, values: tuple[object, ...]) -> None:
    if not _full or event not in ("open", "os.mkdir"):
        return
    folder, room = _full[-1]
    flags = values[2] if event == "open" else os.O_CREAT
    if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return
    if str(values[0]).startswith(folder):
        _made.append(str(values[0]))
        if len(_made) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(values[0]))


sys.addaudithook(_refuse)


@contextlib.contextmanager
def room_for(files: int, folder: Path) -> Iterator[list[str]]:
    """Allows only so many files and folders below a folder to be created or opened for writing; yields the names."""
    _made.clear()
    _full.append((str(folder), files))
    try:
        yield _made
    finally:
        _full.pop()
