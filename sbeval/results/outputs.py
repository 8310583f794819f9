"""What stands where something is to be written is never lost: new files are moved into place, old ones aside."""

import contextlib
import datetime
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from uuid import uuid4

_UNFINISHED = re.compile(r".+\.[0-9a-f]{12}\.part(ial)?")
_SET_ASIDE = re.compile(r".+\.old-\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}(-\d+)?")


def is_unfinished(name: str) -> bool:
    """Whether a name is one under which a file or folder is written before it is moved into place."""
    return _UNFINISHED.fullmatch(name) is not None


def is_set_aside(name: str) -> bool:
    """Whether a name is one that `set_aside` gives."""
    return _SET_ASIDE.fullmatch(name) is not None


def set_aside(folder: Path, *, keep: Iterable[str] = ()) -> Path:
    """Moves all that a folder holds into a new folder beside it, `NAME.old-TIMESTAMP`.

    Args:
        folder: what to empty.
        keep: names of files that stay.

    Returns:
        The new folder.
    """
    stem = f"{folder.name}.old-{datetime.datetime.now().strftime('%Y-%m-%dT%H-%M-%S')}"
    number, aside = 1, folder.with_name(stem)
    while True:
        try:
            aside.mkdir()
            break
        except FileExistsError:
            number += 1
            aside = folder.with_name(f"{stem}-{number}")
    for entry in sorted(folder.iterdir()):
        if entry.name not in keep:
            entry.rename(aside / entry.name)
    return aside


@contextlib.contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """Yields a new folder, of which all lies in `folder` once the block has ended, and nothing where it failed.

    A folder that does not exist yet appears whole. In one that does, each file appears whole and takes the place of a
    file of its name.

    Args:
        folder: where the files belong.
    """
    there = folder.is_dir()
    parent = folder if there else folder.parent
    parent.mkdir(parents=True, exist_ok=True)
    part = parent / f"{folder.name}.{uuid4().hex[:12]}.partial"
    part.mkdir()
    try:
        yield part
        if there:
            _moved_into(part, folder)
        else:
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _moved_into(part: Path, folder: Path) -> None:
    for entry in sorted(part.iterdir(), key=lambda entry: (entry.is_dir(), entry.name)):
        if entry.is_dir():
            (folder / entry.name).mkdir(exist_ok=True)
            _moved_into(entry, folder / entry.name)
        else:
            entry.replace(folder / entry.name)
