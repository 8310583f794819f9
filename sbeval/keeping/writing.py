"""What stands where something is to be written is never lost.

New files are moved into place, old ones aside, and a folder or a file is one process's as long as that lives.
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
"""File that a process holds in the folder where it is at work."""
_UNFINISHED = re.compile(r".+\.[0-9a-f]{12}\.part(ial)?")
_TWELVE_DIGITS = "[0-9a-f]" * 12
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
    """Renames a file or folder, in one step, to `NAME.old-TIMESTAMP` beside it, and prints and returns the new path.

    Raises:
        UserError: it cannot be renamed, or something that the command reads or the current folder lies in it.
    """
    for kept in (Path.cwd(), *reads):
        if kept.resolve().is_relative_to(path.resolve()):
            raise UserError(
                f"Expected to move nothing that is read, nor the current folder, found {kept} in {path}: name another "
                "place."
            )
    path = path.resolve() if path.name == ".." else path.absolute()
    aside = _aside(path)
    try:
        path.rename(aside)
    except OSError as error:
        raise UserError(
            f"Expected to move {path} to {aside.name}, and could not ({error.strerror}): move it yourself, or name "
            "another place."
        ) from error
    print(f"what was there is now in {aside}", flush=True)
    return aside


def set_files_aside(folder: Path, names: Iterable[str]) -> Path:
    """Moves files of a folder, in the order of their names, to a new folder `NAME.old-TIMESTAMP` beside it.

    Everything else in the folder stays where it is. Returns the new folder.

    Raises:
        UserError: a file cannot be moved.
    """
    aside = _aside(folder.resolve())
    with told(aside):
        for name in names:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).rename(aside / name)
    return aside


def _aside(path: Path) -> Path:
    """Returns the first free path of those that say when something at `path` was moved there."""
    stem = f"{path.name}.old-{datetime.datetime.now().strftime('%Y-%m-%dT%H-%M-%S')}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))


@contextlib.contextmanager
def told(folder: Path, what: str = "files", *, remedy: str = "name another") -> Iterator[None]:
    """Says in one sentence that a folder cannot be written to: what is kept there, and what to do.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"Expected a folder to write to, found that {str(folder)!r} cannot keep {what} "
            f"({error.strerror or error}): {remedy}."
        ) from error


@contextlib.contextmanager
def writing_to(folder: Path, what: str, *, remedy: str = OTHER_CACHE) -> Iterator[None]:
    """Makes a folder where it is missing, and says as `told` does that it cannot be written to."""
    with told(folder, what, remedy=remedy):
        folder.mkdir(parents=True, exist_ok=True)
        yield


@contextlib.contextmanager
def whole_file(path: Path, what: str, *, remedy: str = OTHER_CACHE) -> Iterator[Path]:
    """Yields a path to write to; the file stands at `path` once the block has ended, and nowhere where it failed.

    Its folder is made where it is missing; `what` and `remedy` are for the error.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    with writing_to(path.parent, what, remedy=remedy), unfinished(path) as new:
        yield new
        new.replace(path)


@contextlib.contextmanager
def written_beside(folder: Path, *, first: str | None = None) -> Iterator[Path]:
    """Yields a new folder; what it holds lies in `folder` once the block has ended, and nothing does if it failed.

    A folder that does not exist yet appears whole. In another, which stays the same folder, each file appears whole; it
    takes the place of a file of its name, except where the folder was empty when the block began. `first` is as
    `move_into` takes it.

    Raises:
        UserError: the folder cannot be written to.
    """
    folder = folder.resolve()
    with contextlib.ExitStack() as stack:
        with told(folder):
            appears = not folder.exists()
            was_new = is_new(folder)
            parent = folder.parent if appears else folder
            parent.mkdir(parents=True, exist_ok=True)
            _remove_left(folder)  # also where the folder itself has appeared since
            new = stack.enter_context(unfinished(parent / folder.name))
            new.mkdir()
        yield new
        with told(folder):
            if appears:
                new.rename(folder)
            elif was_new and not is_new(folder):
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
            else:
                move_into(folder, new, first=first)


def move_into(folder: Path, new: Path, *, first: str | None = None) -> None:
    """Moves what a new folder holds to another one, each file whole and in place of one of its name.

    Names of the pattern `first` are moved before all others of their folder.
    """
    folder.mkdir(exist_ok=True)
    for entry in sorted(
        new.iterdir(), key=lambda entry: (not (first and entry.match(first)), entry.is_dir(), entry.name)
    ):
        if entry.is_dir():
            move_into(folder / entry.name, entry, first=first)
        else:
            entry.replace(folder / entry.name)


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yields where a file or a folder can be made, to be renamed to `path`; what is left there is then removed.

    That is the name of `path` in a folder beside it, which is locked as long as its process lives: processes side by
    side never see half of anything. Folders that killed processes left are removed first, by their locks; on a file
    system without locks they stay.
    """
    _remove_left(path)
    with contextlib.ExitStack() as stack:
        while True:
            room = path.with_name(f"{path.name}.{uuid4().hex[:12]}.partial")
            room.mkdir()
            stack.callback(shutil.rmtree, room, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):  # a process that looks for what was left was faster
                is_held = stack.enter_context(lock_tried(_lock(room), without_locks=True))
                if is_held and _lock(room).exists():
                    break
        yield room / path.name


def _remove_left(path: Path) -> None:
    for left in path.parent.glob(f"{glob.escape(path.name)}.{_TWELVE_DIGITS}.part*"):
        is_room = left.is_dir()  # or a file that an earlier version left
        with contextlib.suppress(OSError), lock_tried(_lock(left) if is_room else left, without_locks=False) as is_held:
            if is_held and is_room:
                shutil.rmtree(left, ignore_errors=True)
            elif is_held:
                left.unlink()


def _lock(room: Path) -> Path:
    return room / ".lock"


@contextlib.contextmanager
def alone_in(path: Path) -> Iterator[None]:
    """Holds a folder, or a file that is made where it is missing, as long as this process lives and the block runs.

    Raises:
        UserError: another process holds it.
        OSError: it cannot be opened.
    """
    with lock_tried(path, without_locks=True) as is_held:
        if not is_held:
            folder = path if path.is_dir() else path.parent
            raise UserError.expected(
                f"no other process that writes to {folder}", found="one", remedy="wait for it, or name another folder"
            )
        yield


@contextlib.contextmanager
def lock_tried(path: Path, *, without_locks: bool) -> Iterator[bool]:
    """Tries to hold what `alone_in` does; yields whether it is held, `without_locks` where a file system has no locks.

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            is_held = lock_descriptor(descriptor, blocking=False)
        except OSError:
            is_held = without_locks
        yield is_held
    finally:
        os.close(descriptor)
