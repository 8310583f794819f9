"""What lies in a folder, to be compared before and after a command."""

import contextlib
import hashlib
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
