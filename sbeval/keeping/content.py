"""What a process keeps of files, kept by their content: a file that is rewritten under its old name is read again."""

import functools
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

from sbeval.hub_names import local_path
from sbeval.keeping.hashes import files_sha256

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


def content_of(name: str | Path, *, without: tuple[str, ...] = ()) -> tuple[tuple[str, str], ...] | None:
    """Returns the names and hashes of a file, or of all files below a folder.

    Hidden files are left out, and files whose names end with one of `without`. None stands for a name that is neither a
    file nor a folder, such as a hub id.

    Raises:
        OSError: a file cannot be read.
    """
    place = local_path(name)
    if not place.exists():
        return None
    files = [place]
    if place.is_dir():
        below = sorted(place.rglob("*"))
        files = [path for path in below if not any(part.startswith(".") for part in path.relative_to(place).parts)]
    files = [path for path in files if path.is_file() and not path.name.endswith(without)]
    names = (path.relative_to(place).as_posix() for path in files)
    return tuple(zip(names, files_sha256(files), strict=True))


class KeptByContent(Generic[Arguments, Value]):
    """A function whose last results are kept by its arguments and by the content of the file that one of them names."""

    def __init__(
        self, read: Callable[Arguments, Value], maxsize: int, argument: int, content: Callable[[str], Hashable]
    ) -> None:
        functools.update_wrapper(self, read)
        self._argument, self._content = argument, content

        @functools.lru_cache(maxsize=maxsize)
        def kept(_: Hashable, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
            return read(*args, **kwargs)

        self._kept = kept

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        """Returns the kept result, or a new one where the arguments or the file's content are new."""
        name = args[self._argument]
        content = self._content(name) if isinstance(name, str) else None
        return self._kept(content, *args, **kwargs)  # type: ignore[arg-type]  # callers give what can be hashed

    def cache_clear(self) -> None:
        """Forgets all results."""
        self._kept.cache_clear()


def kept_by_content(
    maxsize: int, *, argument: int = 0, content: Callable[[str], Hashable] = content_of
) -> Callable[[Callable[Arguments, Value]], KeptByContent[Arguments, Value]]:
    """Keeps the last `maxsize` results of a function by its arguments and by the content of a file.

    The positional argument of the number `argument` names the file or folder; None or a hub id is kept by its value.
    """
    return lambda read: KeptByContent(read, maxsize, argument, content)
