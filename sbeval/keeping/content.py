"""Caches a function's results in memory by the content of a file, so that a file which is rewritten is read again."""

import functools
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

from sbeval.hub_names import local_path
from sbeval.keeping.hashes import files_sha256

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def content_of(name: str | Path, *, without: tuple[str, ...] = ()) -> tuple[tuple[str, str], ...] | None:
    """Returns the relative names and content hashes of a file, or of all files below a folder.

    Hidden files and files whose names end with one of `without` are left out. Returns None if `name` is neither a file
    nor a folder, such as a hub id.

    Raises:
        OSError: a file cannot be read.
    """
    root = local_path(name)
    if not root.exists():
        return None
    files = [root]
    if root.is_dir():
        below = sorted(root.rglob("*"))
        files = [path for path in below if not any(part.startswith(".") for part in path.relative_to(root).parts)]
    files = [path for path in files if path.is_file() and not path.name.endswith(without)]
    names = (path.relative_to(root).as_posix() for path in files)
    return tuple(zip(names, files_sha256(files), strict=True))


class CachedByContent(Generic[Arguments, Value]):
    """A function with an LRU cache, whose key is the arguments and the content of the file that one of them names."""

    def __init__(
        self, read: Callable[Arguments, Value], maxsize: int, argument: int, content: Callable[[str], Hashable]
    ) -> None:
        functools.update_wrapper(self, read)
        self._argument, self._content = argument, content

        @functools.lru_cache(maxsize=maxsize)
        def cached(_: Hashable, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
            return read(*args, **kwargs)

        self._cached = cached

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        """Returns the cached result, or calls the function if the arguments or the file's content have changed."""
        name = args[self._argument]
        content = self._content(name) if isinstance(name, str) else None
        return self._cached(content, *args, **kwargs)  # type: ignore[arg-type]  # callers pass hashable arguments

    def cache_clear(self) -> None:
        """Removes all cached results."""
        self._cached.cache_clear()


def cached_by_content(
    maxsize: int, *, argument: int = 0, content: Callable[[str], Hashable] = content_of
) -> Callable[[Callable[Arguments, Value]], CachedByContent[Arguments, Value]]:
    """Decorates a function with an LRU cache of `maxsize` results, keyed by its arguments and the content of a file.

    The positional argument with index `argument` names the file or folder. If it is None or a hub id, its value is the
    key.
    """
    return lambda read: CachedByContent(read, maxsize, argument, content)
