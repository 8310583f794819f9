"""What the tasks of one lm-eval run can read: YAML, code and files beside it, and the local data these name."""

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

# arguments that name data
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
_OF_A_TASK = ("dataset_path", "data_dir", "data_files", *DATA)
"""Keys of a task whose values are paths, also if they are bare words."""
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
"""What datasets takes for readers of its own as a `dataset_path`, before it looks for a folder."""
_YAML = (".yaml", ".yml")
# beside a task's code: what a run, a log or a cache writes, and folders of others' results, checkpoints and pages
_WRITTEN = ("*.out", "*.err", "log.txt", "events.out.*", "*_rank[0-9]*.db", "results_*.json", "samples_*.jsonl")
_TRACKERS = ("wandb", "mlruns", "lightning_logs", "logs")
_RECORD, _PAGE = ("run.yaml", "inputs.json"), ("index.html", "summary.md")
_MARKS = (("results_*.json",), ("config.json",), ("pyvenv.cfg",), _RECORD, _PAGE)
# arguments of the model that say where something is kept, which no number depends on
KEPT_IN = frozenset({"cache_dir", "offload_folder", "logits_cache"})
_AROUND_A_PATH = re.compile("^(.*://.*::)?((file|local)://)?")
NO_NAME = re.compile("[\0\ud800-\udfff]")


class _Definition(NamedTuple):
    """What a YAML defines, names and reads; `names` is None where the file cannot be read and may define anything.

    `data` are paths, `texts` all other values that may be; `kept` are where it keeps a cache.
    """

    names: tuple[str, ...] | None = None
    members: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def task_parts(
    folder: Path | None, tasks: Sequence[str], in_use: Sequence[str] = (), kept: Sequence[str] = ()
) -> Parts:
    """Returns the files that define the tasks of a run and lie beside those, and local data they name, by content.

    `folder` is lm-eval's `include_path`; `in_use` are places where the run reads and writes other files, `kept` are its
    caches. Tasks are as lm-eval takes them: names and patterns of tasks, groups and tags, YAML files, patterns of those
    (that end in .yaml), folders of them, and several of these between commas. What cannot be read is "unreadable".
    """
    below = [] if folder is None else list(visible_files(folder))
    definitions = {file.resolve(): _definition(file) for file in below if file.suffix in _YAML}
    wanted = {name for task in tasks for name in task.split(",")}
    defining = set[Path]()
    given = {file.resolve() for name in wanted for file in _yaml_files(name)}
    while True:
        definitions |= {file: _definition(file) for file in given - definitions.keys() if file.is_file()}
        more = {file for file, held in definitions.items() if file in given or _defines(held, wanted)} - defining
        if not more:
            break
        defining |= more
        wanted |= {name for file in more for name in definitions[file].members}
        given |= {(file.parent / name).resolve() for file in more for name in definitions[file].includes}
    used = set(map(os.path.realpath, in_use))
    caches = {
        os.path.realpath(name) for names in (kept, *(definitions[file].kept for file in defining)) for name in names
    }
    modules = {module for file in defining for module in _modules(file, definitions[file])}
    places = {module.parent for module in modules}
    for place in {file.parent for file in defining} - places:
        if any(place.glob("*.py")) or any(module.is_relative_to(place) for module in modules):
            places.add(place)
    beside = {file for place in places for file in _beside(place, used, caches)}
    data = {name for file in defining for name in definitions[file].data}
    data |= {name for file in defining for name in definitions[file].texts if may_be_read(name)}
    contents = [(_shown(file, folder), shortened(_content(file))) for file in sorted(defining | beside)]
    for name in sorted(data):
        if (content := data_sha256(name, _content, used | caches)) is not None:
            contents.append((name, content))
    files: Parts = {}
    for name, content in contents:
        files[name] = short_sha256([files[name], content]) if name in files else content  # of several folders
    return files


def _modules(file: Path, definition: _Definition) -> Iterator[Path]:
    """Yields the local files of the functions that a YAML names as `folder.module.function`."""
    for text in definition.texts:
        module = file.parent / f"{text.rpartition('.')[0].replace('.', '/')}.py"
        if os.path.isfile(module):
            yield module.resolve()


def _beside(place: Path, used: set[str], caches: set[str]) -> Iterator[Path]:
    """Yields the files below a folder of a task's code that this may read.

    That is every file but other tasks, and but folders that runs write into. Of YAML files, logs and what people put
    beside code only those count whose name or ending the code names, and so of all files where the run works below.
    """
    near = _named_in(place.glob("*.py"))

    def leaves_out(folder: str, files: Sequence[str]) -> bool:
        others = [name for name in files if os.fsencode(name) not in near]
        is_tracker = os.path.basename(folder) in _TRACKERS and os.fsencode(os.path.basename(folder)) not in near
        marked = any(all(fnmatch.filter(others, pattern) for pattern in mark) for mark in _MARKS)
        return folder in used | caches or is_tracker or marked

    below = list(visible_files(place, leaves_out))
    named = near | _named_in(file for file in below if file.suffix == ".py")
    is_used = any(Path(other).is_relative_to(place) for other in (os.getcwd(), *used))
    for file in below:
        is_named = not named.isdisjoint(map(os.fsencode, (file.name, file.suffix)))
        patterns = (*NO_PART, *_WRITTEN, *(f"*{ending}" for ending in _YAML))
        usual = is_used or any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns)
        is_task = file.suffix in _YAML and _definition(file).names
        if file.suffix == ".py" or ((is_named or not usual) and not is_task):
            yield file


def _named_in(code: Iterable[Path]) -> set[bytes]:
    """Returns the names between quotes and slashes in code, and the endings before a quote."""
    named = set[bytes]()
    for file in code:
        with contextlib.suppress(UserError):
            text = read_bytes(file)
            named.update(re.findall(rb"(\.\w+)['\"]", text), re.findall(rb"['\"/]([^'\"/\n]+)(?=['\"/])", text))
    return named


def _content(file: Path) -> str:
    try:
        return file_sha256(file)
    except OSError:
        return "unreadable"


def may_be_read(text: str) -> bool:
    """Whether a text that need not be a path may name a file, or with a slash a folder or pattern not around here."""
    place = os.path.expanduser(text)
    beginning = os.path.realpath(re.split(r"[*?[]", place)[0])
    return os.path.isfile(place) or ("/" in text and not Path.cwd().is_relative_to(beginning))


def data_sha256(name: str, content: Callable[[Path], str] = file_sha256, used: Collection[str] = ()) -> str | None:
    """Returns the hash of a local file, or of the names and contents of a folder's or a pattern's files, None for none.

    The name may be a URL of a file, or one of something in an archive, whose hash it then is. Folders below that are
    `used` do not count; `content` returns a file's hash.

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
    return short_sha256([(shown, content(file)) for shown, file in files]) if files else None


def _within(value: Any) -> Iterator[Any]:
    """Yields a value and all within its lists and mappings that may name an input; what aliases repeat comes once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        yield (held := waiting.pop())
        if isinstance(held, dict | list) and id(held) not in seen:
            seen.add(id(held))
            waiting.extend(_inputs(held).values() if isinstance(held, dict) else held)


def _inputs(held: dict[Any, Any]) -> dict[Any, Any]:
    built = held.get("dataset_path") in _BUILDERS
    return {key: inner for key, inner in held.items() if key not in KEPT_IN and (key != "dataset_path" or not built)}


def _strings(value: Any) -> list[str]:
    return [held for held in _within(value) if isinstance(held, str) and not NO_NAME.search(held)]


def _yaml_files(name: str) -> Iterator[Path]:
    pattern = os.path.join(glob.escape(name), "*.yaml") if os.path.isdir(name) else name
    yield from filter(Path.is_file, map(Path, {name, *(glob.glob(pattern) if pattern.endswith(".yaml") else [])}))


def _definition(file: Path) -> _Definition:
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
    mappings = [held for held in _within(settings) if isinstance(held, dict)]
    return _Definition(
        names=tuple(_strings([task if isinstance(task, str) else [], settings.get("group"), settings.get("tag")])),
        members=() if isinstance(task, str) else tuple(_strings(task)),
        includes=tuple(_strings([held.get("include") for held in mappings])),
        data=tuple(_strings([_inputs(held).get(key) for held in mappings for key in _OF_A_TASK])),
        texts=tuple(_strings(settings)),
        kept=tuple(_strings([held.get(key) for held in mappings for key in KEPT_IN])),
    )


def _defines(definition: _Definition, wanted: set[str]) -> bool:
    return definition.names is None or any(fnmatch.filter(definition.names, pattern) for pattern in wanted)


def _shown(file: Path, folder: Path | None) -> str:
    place = file.parent if folder is None else folder.resolve()
    return part_name(file.relative_to(place).as_posix() if file.is_relative_to(place) else file.name)
