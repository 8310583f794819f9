"""A folder or a file that is one process's as long as it lives."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import lock_descriptor

from sbeval.errors import UserError

LOCK = "running.lock"
"""File that a process holds in the folder where it is at work."""


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
            raise UserError(
                f"Expected no other process that writes to {folder}, found one: wait for it, or name another folder."
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
