"""The fingerprint of a run's tasks: their YAML files, code, files beside the code, and local data."""

import contextlib
import fnmatch
import functools
import glob
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sbeval.errors import UserError
from sbeval.fingerprint.checkpoint import NO_PART, visible_files
from sbeval.fingerprint.parts import Parts, part_name, short_sha256, shortened
from sbeval.foreign_files import parse_task_yaml, read_bytes
from sbeval.keeping.hashes import file_sha256

# options whose values are paths of data
DATA = (
    "data_path",
    "dataset",
    "essays",
    "squad",
    "hotpot",
    "trec",
    "banking77",
    "clinc150",
    "nlu",
    "examples_file",
)
_PATH_KEYS = ("dataset_path", "data_dir", "data_files", *DATA)
"""Keys of a task's YAML whose values are paths, even without a slash."""
_BUILDERS = (
    "csv",
    "json",
    "pandas",
    "parquet",
    "arrow",
    "text",
    "conll",
    "xml",
    "hdf5",
    "eval",
    "lance",
    "tsfile",
    "iceberg",
    "webdataset",
    "vortex",
    "mmcif",
    "pdb",
    "genbank",
    "fasta",
    "fastq",
    "harbor",
    *(f"{kind}folder" for kind in ("image", "audio", "video", "mesh", "pdf", "nifti")),
)
"""Values of `dataset_path` that name a dataset builder of the datasets library, not a folder."""
_YAML = (".yaml", ".yml")
# patterns of files that runs, loggers and caches write into the folder of a task's code
_WRITTEN = ("*.out", "*.err", "log.txt", "events.out.*", "*_rank[0-9]*.db", "results_*.json", "samples_*.jsonl")
_TRACKERS = ("wandb", "mlruns", "lightning_logs", "logs")
_RECORD, _PAGE = ("run.yaml", "inputs.json"), ("index.html", "summary.md")
# files that mark a folder of results, a checkpoint, a virtual environment, a sweep run, or a report page
_MARKS = (("results_*.json",), ("config.json",), ("pyvenv.cfg",), _RECORD, _PAGE)
# arguments of the model that name cache folders, on which no result depends
CACHE_ARGUMENTS = frozenset({"cache_dir", "offload_folder", "logits_cache"})
# URL parts before the path of a file
_AROUND_A_PATH = re.compile("^(.*://.*::)?((file|local)://)?")
# characters that no file name contains
NO_NAME = re.compile("[\0\ud800-\udfff]")


class _Definition(NamedTuple):
    """The parts of a task's YAML file that decide which files it reads.

    Attributes:
        names: names of the task, group and tags that it defines; None if it cannot be read and may define any task.
        members: names of a group's tasks.
        includes: YAML files that it includes.
        data: values that are paths of data.
        texts: all strings in the file; each may be a path.
        cache_folders: its cache folders.
    """

    names: tuple[str, ...] | None = None
    members: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    cache_folders: tuple[str, ...] = ()


def task_parts(
    folder: Path | None, tasks: Sequence[str], in_use: Sequence[str] = (), cache_folders: Sequence[str] = ()
) -> Parts:
    """Returns hashes of the files that define a run's tasks, the files beside their code, and the local data they name.

    A file that cannot be read has the hash "unreadable".

    Args:
        folder: lm-eval's `include_path`.
        tasks: tasks as lm-eval takes them: names and patterns of tasks, groups and tags, YAML files, patterns of YAML
            files, folders of them; several may be joined by commas.
        in_use: paths where the run reads and writes other files.
        cache_folders: cache folders of the run.
    """
    below = [] if folder is None else list(visible_files(folder))
    definitions = {file.resolve(): _definition(file) for file in below if file.suffix in _YAML}
    task_names = {name for task in tasks for name in task.split(",")}
    named_files = {file.resolve() for name in task_names for file in _yaml_files(name)}
    defining = set[Path]()
    # groups name further tasks, and files include further files: repeat until nothing new is found
    while True:
        definitions |= {file: _definition(file) for file in named_files - definitions.keys() if file.is_file()}
        defining_now = {
            file for file, definition in definitions.items() if file in named_files or _defines(definition, task_names)
        }
        new_files = defining_now - defining
        if not new_files:
            break
        defining |= new_files
        task_names |= {name for file in new_files for name in definitions[file].members}
        named_files |= {(file.parent / name).resolve() for file in new_files for name in definitions[file].includes}
    used = set(map(os.path.realpath, in_use))
    caches = {
        os.path.realpath(name)
        for names in (cache_folders, *(definitions[file].cache_folders for file in defining))
        for name in names
    }
    modules = {module for file in defining for module in _modules(file, definitions[file])}
    places = {module.parent for module in modules}
    for place in {file.parent for file in defining} - places:
        if any(place.glob("*.py")) or any(module.is_relative_to(place) for module in modules):
            places.add(place)
    beside = {file for place in places for file in _beside(place, used, caches)}
    data = {name for file in defining for name in definitions[file].data}
    data |= {name for file in defining for name in definitions[file].texts if may_be_read(name)}
    contents = [(_relative_name(file, folder), shortened(_content(file))) for file in sorted(defining | beside)]
    for name in sorted(data):
        if (content := data_sha256(name, _content, used | caches)) is not None:
            contents.append((name, content))
    files: Parts = {}
    for name, content in contents:
        files[name] = (
            short_sha256([files[name], content]) if name in files else content
        )  # files with the same name in several folders share one part
    return files


def _modules(file: Path, definition: _Definition) -> Iterator[Path]:
    """Yields the Python files of functions that a YAML file names as `folder.module.function`."""
    for text in definition.texts:
        module = file.parent / f"{text.rpartition('.')[0].replace('.', '/')}.py"
        if os.path.isfile(module):
            yield module.resolve()


def _beside(place: Path, used: set[str], caches: set[str]) -> Iterator[Path]:
    """Yields the files below a folder of a task's code that the code may read.

    Python files are always yielded; YAML files of other tasks and folders that runs write into never are. Other YAML
    files, logs, and files that people put beside code are yielded only if the code mentions their name or suffix. If
    the run itself works or writes below the folder, this condition applies to all files but Python files.
    """
    mentioned_here = _named_in(place.glob("*.py"))

    def leaves_out(folder: str, files: Sequence[str]) -> bool:
        unmentioned = [name for name in files if os.fsencode(name) not in mentioned_here]
        name = os.path.basename(folder)
        is_tracker = name in _TRACKERS and os.fsencode(name) not in mentioned_here
        is_marked = any(all(fnmatch.filter(unmentioned, pattern) for pattern in mark) for mark in _MARKS)
        return folder in used | caches or is_tracker or is_marked

    below = list(visible_files(place, leaves_out))
    mentioned = mentioned_here | _named_in(file for file in below if file.suffix == ".py")
    is_used = any(Path(other).is_relative_to(place) for other in (os.getcwd(), *used))
    for file in below:
        is_mentioned = not mentioned.isdisjoint(map(os.fsencode, (file.name, file.suffix)))
        patterns = (*NO_PART, *_WRITTEN, *(f"*{ending}" for ending in _YAML))
        must_be_mentioned = is_used or any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns)
        is_task = file.suffix in _YAML and _definition(file).names
        if file.suffix == ".py" or ((is_mentioned or not must_be_mentioned) and not is_task):
            yield file


def _named_in(code: Iterable[Path]) -> set[bytes]:
    """Returns file names and suffixes that occur in Python code, between quotes or slashes."""
    names = set[bytes]()
    for file in code:
        with contextlib.suppress(UserError):
            text = read_bytes(file)
            names.update(re.findall(rb"(\.\w+)['\"]", text), re.findall(rb"['\"/]([^'\"/\n]+)(?=['\"/])", text))
    return names


def _content(file: Path) -> str:
    """Returns a file's hash, or "unreadable"."""
    try:
        return file_sha256(file)
    except OSError:
        return "unreadable"


def may_be_read(text: str) -> bool:
    """Whether a string may be a path of data: an existing file, or a path or pattern with a slash.

    The current folder and those above it are not data.
    """
    place = os.path.expanduser(text)
    beginning = os.path.realpath(re.split(r"[*?[]", place)[0])
    return os.path.isfile(place) or ("/" in text and not Path.cwd().is_relative_to(beginning))


def data_sha256(name: str, content: Callable[[Path], str] = file_sha256, used: Collection[str] = ()) -> str | None:
    """Returns the hash of local data: a file, or all files of a folder or glob pattern. None if there are no files.

    Args:
        name: path, glob pattern or file URL; for a URL into an archive ("zip://...::file") the archive is hashed.
        content: returns a file's hash.
        used: subfolders to leave out.

    Raises:
        OSError: a file cannot be read.
    """
    name = os.path.expanduser(_AROUND_A_PATH.sub("", name))
    place = Path(name)
    if os.path.isfile(name):
        return short_sha256([place.name, content(place)])
    if os.path.isdir(name):
        below = visible_files(place, lambda folder, files: folder in used)
        files = [(file.relative_to(place).as_posix(), file) for file in below]
    else:
        matched = [file for file in sorted(glob.glob(str(place), recursive=True)) if not file.endswith(".pyc")]
        files = [(file, Path(file)) for file in matched if os.path.isfile(file)]
    return short_sha256([(relative, content(file)) for relative, file in files]) if files else None


def _within(value: Any) -> Iterator[Any]:
    """Yields a value and all values nested in it, except settings that name no input (see `_inputs`)."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        inner = waiting.pop()
        yield inner
        if isinstance(inner, dict | list) and id(inner) not in seen:
            seen.add(id(inner))
            waiting.extend(_inputs(inner).values() if isinstance(inner, dict) else inner)


def _inputs(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the entries of a YAML mapping that may name inputs."""
    left_out = set(CACHE_ARGUMENTS)
    if mapping.get("dataset_path") in _BUILDERS:
        left_out.add("dataset_path")
    return {key: value for key, value in mapping.items() if key not in left_out}


def _strings(value: Any) -> list[str]:
    """Returns all strings in a value that can be a file's name."""
    return [inner for inner in _within(value) if isinstance(inner, str) and not NO_NAME.search(inner)]


def _yaml_files(name: str) -> Iterator[Path]:
    """Yields the YAML files that lm-eval loads for a task given as a file, a folder or a pattern."""
    pattern = os.path.join(glob.escape(name), "*.yaml") if os.path.isdir(name) else name
    yield from filter(Path.is_file, map(Path, {name, *(glob.glob(pattern) if pattern.endswith(".yaml") else [])}))


def _definition(file: Path) -> _Definition:
    """Parses a task's YAML file; the result is cached by content."""
    return _read(file, _content(file))


@functools.lru_cache(maxsize=4096)
def _read(file: Path, content: str) -> _Definition:
    try:
        settings = parse_task_yaml(read_bytes(file))
    except ValueError:
        return _Definition()
    if not isinstance(settings, dict):
        return _Definition(names=())
    task = settings.get("task")
    mappings = [value for value in _within(settings) if isinstance(value, dict)]
    return _Definition(
        names=tuple(_strings([task if isinstance(task, str) else [], settings.get("group"), settings.get("tag")])),
        members=() if isinstance(task, str) else tuple(_strings(task)),
        includes=tuple(_strings([mapping.get("include") for mapping in mappings])),
        data=tuple(_strings([_inputs(mapping).get(key) for mapping in mappings for key in _PATH_KEYS])),
        texts=tuple(_strings(settings)),
        cache_folders=tuple(_strings([mapping.get(key) for mapping in mappings for key in CACHE_ARGUMENTS])),
    )


def _defines(definition: _Definition, task_names: set[str]) -> bool:
    """Whether a YAML file defines, or may define, one of these tasks, groups, tags or patterns."""
    return definition.names is None or any(fnmatch.filter(definition.names, pattern) for pattern in task_names)


def _relative_name(file: Path, folder: Path | None) -> str:
    """Returns a file's path relative to lm-eval's `include_path`, or its name if it lies elsewhere."""
    place = file.parent if folder is None else folder.resolve()
    return part_name(file.relative_to(place).as_posix() if file.is_relative_to(place) else file.name)
