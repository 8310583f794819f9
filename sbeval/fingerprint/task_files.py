"""The files of a user's own tasks that a run depends on: their YAML, what that includes, code beside it, and data."""

import functools
import glob
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from sbeval.fingerprint.checkpoint import visible_files
from sbeval.fingerprint.parts import Parts, part_name, short_sha256, shortened
from sbeval.foreign_files import parse_task_yaml, read_bytes
from sbeval.keeping.hashes import file_sha256


class _Definition(NamedTuple):
    """What a YAML defines, names and reads; `names` is None where the file cannot be read and may define anything."""

    names: tuple[str, ...] | None = None
    members: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    data: tuple[str, ...] = ()


def task_parts(folder: Path | None, tasks: Sequence[str]) -> Parts:
    """Returns the files that define the tasks of a run, and the local data they name, by content.

    Args:
        folder: lm-eval's `include_path`, None without one.
        tasks: as lm-eval takes them: names and patterns of tasks, groups and tags, YAML files, patterns of those (that
            end in .yaml), folders of them, and several of these between commas.

    Raises:
        OSError: a file cannot be read.
    """
    below = [] if folder is None else list(visible_files(folder))
    definitions = {file.resolve(): _definition(file) for file in below if file.suffix in (".yaml", ".yml")}
    wanted, found = {name for task in tasks for name in task.split(",")}, set[Path]()
    named = {file.resolve() for name in wanted for file in _yaml_files(name)}
    while True:
        definitions |= {file: _definition(file) for file in named - definitions.keys() if file.is_file()}
        more = {file for file, one in definitions.items() if file in named or _defines(one, wanted)} - found
        if not more:
            break
        found |= more
        wanted |= {name for file in more for name in definitions[file].members}
        named |= {(file.parent / name).resolve() for file in more for name in definitions[file].includes}
    places = {file.parent for file in found}
    code = {code for place in places for code in visible_files(place) if code.suffix == ".py"}
    files: Parts = {}
    for file in sorted(found | code):
        name, content = _shown(file, folder), shortened(file_sha256(file))
        files[name] = short_sha256([files[name], content]) if name in files else content  # of several folders
    data = {name for file in found for name in definitions[file].data}
    return files | {name: value for name in sorted(data) if (value := data_sha256(name)) is not None}


def data_sha256(name: str) -> str | None:
    """Returns the hash of a local file, or of the names and contents of a folder's or a pattern's files.

    Args:
        name: a path, or a pattern of paths.

    Returns:
        The hash; None where nothing is there.

    Raises:
        OSError: a file cannot be read.
    """
    place = Path(os.path.expanduser(name))
    if place.is_file():
        return short_sha256([place.name, file_sha256(place)])
    if place.is_dir():
        files = [(file.relative_to(place).as_posix(), file) for file in visible_files(place)]
    else:
        files = [(file, Path(file)) for file in sorted(glob.glob(str(place), recursive=True)) if Path(file).is_file()]
    return short_sha256([(shown, file_sha256(file)) for shown, file in files]) if files else None


def strings(value: Any) -> Iterator[str]:
    """Yields every text within lists and mappings; what YAML's aliases repeat comes once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict | list) and id(one) not in seen:
            seen.add(id(one))
            waiting.extend(one.values() if isinstance(one, dict) else one)


def _yaml_files(name: str) -> Iterator[Path]:
    pattern = os.path.join(glob.escape(name), "*.yaml") if os.path.isdir(name) else name
    yield from filter(Path.is_file, map(Path, {name, *(glob.glob(pattern) if pattern.endswith(".yaml") else [])}))


def _definition(file: Path) -> _Definition:
    return _read(file, file_sha256(file))


@functools.lru_cache(maxsize=4096)
def _read(file: Path, content: str) -> _Definition:
    try:
        found = parse_task_yaml(read_bytes(file))
    except ValueError:
        return _Definition()
    if not isinstance(found, dict):
        return _Definition(names=())
    task, include, options = found.get("task"), found.get("include"), found.get("dataset_kwargs")
    files = [options.get(key) for key in ("data_dir", "data_files")] if isinstance(options, dict) else []
    members = [] if isinstance(task, str) else task
    return _Definition(
        names=tuple(strings([task if isinstance(task, str) else [], found.get("group"), found.get("tag")])),
        members=tuple(strings(members)),
        includes=tuple(strings(include)),
        # a bare word elsewhere is no path, although a folder may be called so
        data=(*strings(files), *(name for name in strings([found.get("dataset_path"), options]) if "/" in name)),
    )


def _defines(definition: _Definition, wanted: set[str]) -> bool:
    return definition.names is None or any(fnmatch(name, one) for name in definition.names for one in wanted)


def _shown(file: Path, folder: Path | None) -> str:
    place = file.parent if folder is None else folder.resolve()
    return part_name(file.relative_to(place).as_posix() if file.is_relative_to(place) else file.name)
