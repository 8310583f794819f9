"""What stands where something is to be written is never lost: new files are moved into place, old ones aside."""

import contextlib
import datetime
import errno
import fcntl
import glob
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from uuid import uuid4

from sbeval.errors import UserError

LOCK = "running.lock"
"""File that a process holds in the folder where it is at work."""
_UNFINISHED = re.compile(r".+\.[0-9a-f]{12}\.part(ial)?")
_SET_ASIDE = re.compile(r".+\.old-\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}(-\d+)?")


def is_unfinished(name: str) -> bool:
    """Whether a name is one under which a file or folder is written before it is moved into place."""
    return _UNFINISHED.fullmatch(name) is not None


def is_set_aside(name: str) -> bool:
    """Whether a name is one that `set_aside` gives."""
    return _SET_ASIDE.fullmatch(name) is not None


def is_new(path: Path) -> bool:
    """Whether a path is free, or a folder that is empty or holds unfinished files alone."""
    return not os.path.lexists(path) or (path.is_dir() and all(is_unfinished(entry.name) for entry in path.iterdir()))


def set_aside(path: Path, *, reads: Iterable[Path] = ()) -> Path:
    """Renames a file or folder, in one step, to `NAME.old-TIMESTAMP` beside it, and prints the new path.

    Args:
        path: what to move.
        reads: files and folders that the command reads.

    Returns:
        The new path.

    Raises:
        UserError: it cannot be renamed, or something that is read or the current folder lies in it.
    """
    for kept in (Path.cwd(), *reads):
        if kept.resolve().is_relative_to(path.resolve()):
            raise UserError(
                f"Expected to move nothing that is read, nor the current folder, found {kept} in {path}: name another "
                "place."
            )
    path = path.resolve() if path.name == ".." else path.absolute()
    stem = f"{path.name}.old-{datetime.datetime.now().strftime('%Y-%m-%dT%H-%M-%S')}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    aside = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
    try:
        path.rename(aside)
    except OSError as error:
        raise UserError(
            f"Expected to move {path} to {aside.name}, and could not ({error.strerror}): move it yourself, or name "
            "another place."
        ) from error
    print(f"what was there is now in {aside}", flush=True)
    return aside


@contextlib.contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """Holds a folder, or a file that is made where it is missing, as long as this process lives and the block runs.

    Raises:
        UserError: another process holds it.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not locked(descriptor):
            folder = path if path.is_dir() else path.parent
            raise UserError(
                f"Expected no other process that writes to {folder}, found one: wait for it, or name another folder."
            )
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def written_beside(folder: Path, *, first: str | None = None) -> Iterator[Path]:
    """Yields a new folder; what it holds lies in `folder` once the block has ended, and nothing does if it failed.

    A folder that does not exist yet appears whole. In another, which stays the same folder, each file appears whole; it
    takes the place of a file of its name, except where the folder was empty when the block began.

    Args:
        folder: where the files belong.
        first: name of the file that is moved into place before all others.

    Raises:
        UserError: the folder cannot be written to.
    """
    folder = folder.resolve()
    with contextlib.ExitStack() as stack:
        with told(folder):
            appears, was_new = not folder.exists(), is_new(folder)
            parent = folder.parent if appears else folder
            parent.mkdir(parents=True, exist_ok=True)
            _remove_left(folder, "partial")  # also where the folder itself has appeared since
            part = stack.enter_context(part_of(parent / folder.name, "partial"))
        yield part
        with told(folder):
            if appears:
                part.rename(folder)
            elif was_new and not is_new(folder):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
            else:
                _move_into(part, folder, first)


@contextlib.contextmanager
def part_of(path: Path, ending: str) -> Iterator[Path]:
    """Yields a new file (`ending` is "part") or folder ("partial") beside `path`, gone once the block has ended.

    It is locked as long as its process lives. Those that killed processes left are removed first, by their locks; on a
    file system without locks they stay.
    """
    _remove_left(path, ending)
    while True:
        part = path.with_name(f"{path.name}.{uuid4().hex[:12]}.{ending}")
        if ending == "partial":
            part.mkdir()
        with contextlib.suppress(FileNotFoundError):  # a process that looks for what was left was faster than the lock
            descriptor = os.open(
                part, os.O_RDONLY if ending == "partial" else os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666
            )
            if locked(descriptor) and os.path.lexists(part):
                break
            os.close(descriptor)
    try:
        yield part
    finally:
        _remove(part)
        os.close(descriptor)


def locked(descriptor: int) -> bool:
    """Locks an open file until it is closed or its process has died.

    Returns:
        False where another process has locked it; True also where the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _remove_left(path: Path, ending: str) -> None:
    for part in path.parent.glob(f"{glob.escape(path.name)}.*.{ending}"):
        if not is_unfinished(part.name) or part.name.count(".") != path.name.count(".") + 2:
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(part, os.O_RDONLY if part.is_dir() else os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(part)
            finally:
                os.close(descriptor)


def _remove(part: Path) -> None:
    if part.is_dir() and not part.is_symlink():
        shutil.rmtree(part, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            part.unlink()


@contextlib.contextmanager
def told(folder: Path) -> Iterator[None]:
    """Says in one sentence that a folder cannot be written to."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"Expected a folder to write to, but {folder} cannot be one ({error.strerror}); name another."
        ) from error


def _move_into(part: Path, folder: Path, first: str | None) -> None:
    for entry in sorted(part.iterdir(), key=lambda entry: (entry.name != first, entry.is_dir(), entry.name)):
        if entry.is_dir():
            (folder / entry.name).mkdir(exist_ok=True)
            _move_into(entry, folder / entry.name, None)
        else:
            entry.replace(folder / entry.name)
