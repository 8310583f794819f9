"""Atomic writes and locks: nothing that exists at a path is lost when something is written there.

New files and folders are written under a temporary name and renamed into place. Existing ones are moved aside. A lock
on a file or folder lasts until its process ends.
"""

import contextlib
import datetime
import errno
import glob
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from uuid import uuid4

from filelock import lock_descriptor

from sbeval.errors import UserError

OTHER_CACHE = "set SBEVAL_CACHE to a folder with space that you may write to"
LOCK = "running.lock"
"""Name of the lock file in a folder that a process works in."""
_UNFINISHED = re.compile(r".+\.[0-9a-f]{12}\.part(ial)?")
_TWELVE_DIGITS = "[0-9a-f]" * 12
_SET_ASIDE = re.compile(r".+\.old-\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}(-\d+)?")


def is_unfinished(name: str) -> bool:
    """Whether a name is the temporary name of a file or folder that is not yet in place."""
    return _UNFINISHED.fullmatch(name) is not None


def is_set_aside(name: str) -> bool:
    """Whether a name is one that `set_aside` makes, `NAME.old-TIMESTAMP`."""
    return _SET_ASIDE.fullmatch(name) is not None


def is_new(path: Path) -> bool:
    """Whether a path does not exist, or is a folder that is empty or holds only temporary files."""
    return not os.path.lexists(path) or (path.is_dir() and all(is_unfinished(entry.name) for entry in path.iterdir()))


def set_aside(path: Path, *, reads: Iterable[Path] = ()) -> Path:
    """Renames a file or folder to `NAME.old-TIMESTAMP` beside it, and prints and returns the new path.

    Raises:
        UserError: it cannot be renamed, or it contains the current folder or one of the paths `reads`, which the
            command reads.
    """
    for needed_path in (Path.cwd(), *reads):
        if needed_path.resolve().is_relative_to(path.resolve()):
            raise UserError(
                f"{path} cannot be moved aside, because it contains {needed_path}, which this command reads or runs "
                "in: name another output folder."
            )
    path = path.resolve() if path.name == ".." else path.absolute()
    aside = _aside(path)
    try:
        path.rename(aside)
    except OSError as error:
        raise UserError(
            f"{path} could not be renamed to {aside.name} ({error.strerror}): move it yourself, or name another output "
            "folder."
        ) from error
    print(f"what was there is now in {aside}", flush=True)
    return aside


def set_files_aside(folder: Path, names: Iterable[str]) -> Path:
    """Moves files of a folder, in the order of `names`, to a new folder `NAME.old-TIMESTAMP` beside it.

    Everything else in the folder stays there. Returns the new folder.

    Raises:
        UserError: a file cannot be moved.
    """
    aside = _aside(folder.resolve())
    with write_errors_explained(aside):
        for name in names:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).rename(aside / name)
    return aside


def _aside(path: Path) -> Path:
    """Returns the first free path `NAME.old-TIMESTAMP` or `NAME.old-TIMESTAMP-NUMBER` beside `path`."""
    stem = f"{path.name}.old-{datetime.datetime.now().strftime('%Y-%m-%dT%H-%M-%S')}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))


@contextlib.contextmanager
def write_errors_explained(folder: Path, what: str = "files", *, remedy: str = "name another folder") -> Iterator[None]:
    """Turns an `OSError` in the block into a `UserError` about writing to `folder`.

    `what` is written there, and `remedy` says what to do; both are parts of the message.

    Raises:
        UserError: the disk is full, or the folder cannot be written to.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"The folder {str(folder)!r} cannot be written to, for {what} ({error.strerror or error}): {remedy}."
        ) from error


@contextlib.contextmanager
def writing_to(folder: Path, what: str, *, remedy: str = OTHER_CACHE) -> Iterator[None]:
    """Makes a folder if it is missing, and explains write errors in the block as `write_errors_explained` does."""
    with write_errors_explained(folder, what, remedy=remedy):
        folder.mkdir(parents=True, exist_ok=True)
        yield


@contextlib.contextmanager
def whole_file(path: Path, what: str, *, remedy: str = OTHER_CACHE) -> Iterator[Path]:
    """Writes a file atomically: yields a temporary path, which is renamed to `path` after the block, or deleted.

    The folder is made if it is missing. `what` and `remedy` are parts of the error message.

    Raises:
        UserError: the disk is full, or the folder cannot be written to.
    """
    with writing_to(path.parent, what, remedy=remedy), unfinished(path) as new:
        yield new
        new.replace(path)


@contextlib.contextmanager
def written_beside(folder: Path, *, first: str | None = None) -> Iterator[Path]:
    """Yields a temporary folder, whose contents are moved to `folder` after the block, or deleted if the block fails.

    If `folder` does not exist, the temporary folder is renamed to it. If it exists, each file is moved into it
    atomically and replaces a file with the same name. If `folder` was empty before the block and another process has
    filled it since, nothing is replaced and an error is raised. `first` is passed to `move_into`.

    Raises:
        UserError: the folder cannot be written to.
    """
    folder = folder.resolve()
    with contextlib.ExitStack() as stack:
        with write_errors_explained(folder):
            is_missing = not folder.exists()
            was_new = is_new(folder)
            parent = folder.parent if is_missing else folder
            parent.mkdir(parents=True, exist_ok=True)
            # a killed process may have left temporary files beside the folder, even if the folder exists now
            _remove_abandoned(folder)
            new = stack.enter_context(unfinished(parent / folder.name))
            new.mkdir()
        yield new
        with write_errors_explained(folder):
            if is_missing:
                new.rename(folder)
            elif was_new and not is_new(folder):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
            else:
                move_into(folder, new, first=first)


def move_into(folder: Path, new: Path, *, first: str | None = None) -> None:
    """Moves the contents of the folder `new` into `folder`; files replace files with the same name atomically.

    Files that match the pattern `first` are moved before all others of their folder.
    """
    folder.mkdir(exist_ok=True)

    def order(entry: Path) -> tuple[bool, bool, str]:
        return not (first and entry.match(first)), entry.is_dir(), entry.name

    for entry in sorted(new.iterdir(), key=order):
        if entry.is_dir():
            move_into(folder / entry.name, entry, first=first)
        else:
            entry.replace(folder / entry.name)


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yields a temporary path at which to make a file or folder; the caller renames it to `path`.

    The temporary path is in a temporary folder beside `path`, which is locked while this process lives and removed
    after the block. Temporary folders that killed processes left are removed first: nobody holds their locks. On a file
    system without locks they stay.
    """
    _remove_abandoned(path)
    with contextlib.ExitStack() as stack:
        while True:
            temporary_folder = path.with_name(f"{path.name}.{uuid4().hex[:12]}.partial")
            temporary_folder.mkdir()
            stack.callback(shutil.rmtree, temporary_folder, ignore_errors=True)
            # another process may remove the folder as abandoned before it is locked; then make another one
            with contextlib.suppress(FileNotFoundError):
                is_locked = stack.enter_context(lock_tried(_lock(temporary_folder), without_locks=True))
                if is_locked and _lock(temporary_folder).exists():
                    break
        yield temporary_folder / path.name


def _remove_abandoned(path: Path) -> None:
    """Removes temporary files and folders made for `path` whose lock no living process holds."""
    for abandoned in path.parent.glob(f"{glob.escape(path.name)}.{_TWELVE_DIGITS}.part*"):
        is_folder = abandoned.is_dir()  # earlier versions made files
        lock = _lock(abandoned) if is_folder else abandoned
        with contextlib.suppress(OSError), lock_tried(lock, without_locks=False) as is_locked:
            if is_locked and is_folder:
                shutil.rmtree(abandoned, ignore_errors=True)
            elif is_locked:
                abandoned.unlink()


def _lock(folder: Path) -> Path:
    return folder / ".lock"


@contextlib.contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """Locks a folder or file while the block runs; the kernel frees the lock if this process dies.

    A missing file is made.

    Raises:
        UserError: another process holds the lock.
        OSError: the path cannot be opened.
    """
    with lock_tried(path, without_locks=True) as is_locked:
        if not is_locked:
            folder = path if path.is_dir() else path.parent
            raise UserError(f"Another process is writing to {folder}: wait until it has ended, or name another folder.")
        yield


@contextlib.contextmanager
def lock_tried(path: Path, *, without_locks: bool) -> Iterator[bool]:
    """Tries to lock a folder or file as `alone_in` does, and yields whether it is locked.

    On a file system without locks it yields `without_locks`.

    Raises:
        OSError: the path cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            is_locked = lock_descriptor(descriptor, blocking=False)
        except OSError:
            is_locked = without_locks
        yield is_locked
    finally:
        os.close(descriptor)
