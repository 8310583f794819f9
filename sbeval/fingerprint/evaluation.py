"""What one lm-eval run depends on: its settings, and the parts of everything that these name."""

import functools
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from sbeval.errors import UserError
from sbeval.fingerprint.checkpoint import NO_PART, checkpoint_parts, visible_files
from sbeval.fingerprint.parts import REVISION, Parts, named, part_name, short_sha256, shortened, versions
from sbeval.foreign_files import parse_task_yaml, read_bytes
from sbeval.hub_names import hub_commit
from sbeval.keeping.hashes import file_sha256
from sbeval.results.records import LABEL

# arguments that name a checkpoint, an adapter or a tokenizer, and those that name data
_CHECKPOINTS = ("pretrained", "tokenizer", "peft", "delta", "longppl_evaluator")
_DATA = (
    *("data_path", "dataset", "essays", "squad", "hotpot"),
    *("trec", "banking77", "clinc150", "nlu", "examples_file"),
)
_FILE_OF = {"extrapolation": "longrope:"}
"""Arguments whose value may be a file behind this."""
_NAMING = ("model_args", "metadata")
_OF_A_TASK = ("dataset_path", "data_dir", "data_files", *_DATA)
"""Keys of a task whose values are paths, also if they are bare words."""
_YAML = (".yaml", ".yml")
# arguments of the model that say where something is kept, which no number depends on
KEPT_IN = frozenset({"cache_dir", "offload_folder", "logits_cache"})
_AROUND_A_PATH = re.compile("^(.*://.*::)?((file|local)://)?")
_NO_NAME = re.compile("[\0\ud800-\udfff]")
_LOCAL = "a local file or folder"


class RunInputs(NamedTuple):
    """What two runs have to share for one's numbers to be the other's.

    The configuration by name ("limit", "model_args.dtype"), without where its results go and where its local inputs
    lie; and the parts of the inputs that it names, by content, with versions.
    """

    settings: dict[str, Any]
    parts: Parts


def run_inputs(config: Mapping[str, Any]) -> RunInputs:
    """Returns what a run depends on, as far as it is known before the run, from what lm-eval reads with `--config`.

    Raises:
        UserError: a file cannot be read.
    """
    arguments = config.get("model_args") or {}
    parts = versions()
    revision, subfolder = arguments.get("revision"), str(arguments.get("subfolder") or "")

    def read(given: Any, name: str, key: str) -> Any:
        """Adds the parts of what a value names; returns the value, without the place of what is local."""
        if isinstance(given, Mapping):
            return {key: read(inner, f"{name}.{key}", str(key)) for key, inner in given.items()}
        if not isinstance(given, str) or _NO_NAME.search(given):
            return given
        value = given.removeprefix(_FILE_OF.get(key, ""))
        if key in _CHECKPOINTS:
            local = os.path.exists(os.path.expanduser(value))
            # hf hands both on to the model and its tokenizer, and adapters take the revision alone
            held = checkpoint_parts(
                value,
                revision=revision if key != "longppl_evaluator" else None,
                subfolder=subfolder if key in ("pretrained", "tokenizer") else "",
            )
            parts.update(held if name == "model_args.pretrained" else named(name.removeprefix("model_args."), held))
        else:
            content = data_sha256(value) if key in (*_DATA, *_FILE_OF) or _may_be_read(value) else None
            if local := content is not None:
                parts[name.removeprefix("model_args.")] = content
        return _LOCAL if local else given

    try:
        settings = {
            f"{key}.{name}": read(value, f"{key}.{name}", str(name))
            for key in _NAMING
            for name, value in (config.get(key) or {}).items()
            if name not in KEPT_IN and (key, name) != ("metadata", LABEL)
        }
        folder = config.get("include_path")
        used = (config.get("output_path"), arguments.get("pretrained"))
        in_use = [os.path.expanduser(str(place or "")) for place in used]
        parts |= task_parts(Path(os.path.expanduser(folder)) if folder else None, config.get("tasks") or [], in_use)
    except OSError as error:
        raise UserError(
            f"Expected to read what the run depends on, found that {error.filename} cannot be read "
            f"({error.strerror}): check its permissions."
        ) from error
    left_out = {"output_path", *_NAMING}
    if folder and Path(os.path.expanduser(folder)).is_dir():
        left_out.add("include_path")
    return RunInputs(settings | {key: value for key, value in config.items() if key not in left_out}, parts)


def data_revisions(configs: Mapping[str, Any]) -> Parts:
    """Returns the commits that the hub's cache names for the data sets in the `configs` of a results file."""
    names = set[tuple[str, str | None]]()
    for config in configs.values():
        config = config if isinstance(config, dict) else {}
        options = config.get("dataset_kwargs")
        revision = options.get("revision") if isinstance(options, dict) else None
        names.add((str(config.get("dataset_path")), str(revision) if revision else None))
        metadata = config.get("metadata")
        record = metadata.get("sbeval") if isinstance(metadata, dict) else None
        detail = record.get("corpus_detail") if isinstance(record, dict) else None
        if isinstance(detail, str):  # "owner/name/configuration:split"
            names.add(("/".join(detail.partition(":")[0].partition(",")[0].split("/")[:2]), None))
    commits = {name: hub_commit(name, "datasets", revision) for name, revision in names}
    return {f"{name} {REVISION}": commit for name, commit in sorted(commits.items()) if commit}


class _Definition(NamedTuple):
    """What a YAML defines, names and reads; `names` is None where the file cannot be read and may define anything.

    `data` are paths, `texts` all other values that may be.
    """

    names: tuple[str, ...] | None = None
    members: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()


def task_parts(folder: Path | None, tasks: Sequence[str], in_use: Sequence[str] = ()) -> Parts:
    """Returns the files that define the tasks of a run and lie beside those, and local data they name, by content.

    `folder` is lm-eval's `include_path`; `in_use` are places where the run reads and writes other files. Tasks are as
    lm-eval takes them: names and patterns of tasks, groups and tags, YAML files, patterns of those (that end in .yaml),
    folders of them, and several of these between commas.

    Raises:
        OSError: a file cannot be read.
    """
    below = [] if folder is None else list(visible_files(folder))
    definitions = {file.resolve(): _definition(file) for file in below if file.suffix in _YAML}
    wanted, defining = {name for task in tasks for name in task.split(",")}, set[Path]()
    given = {file.resolve() for name in wanted for file in _yaml_files(name)}
    while True:
        definitions |= {file: _definition(file) for file in given - definitions.keys() if file.is_file()}
        more = {file for file, held in definitions.items() if file in given or _defines(held, wanted)} - defining
        if not more:
            break
        defining |= more
        wanted |= {name for file in more for name in definitions[file].members}
        given |= {(file.parent / name).resolve() for file in more for name in definitions[file].includes}
    used = [Path(place).resolve() for place in ("", *in_use)]
    beside = {file for place in {file.parent for file in defining} for file in _beside(place, used)}
    data = {name for file in defining for name in definitions[file].data}
    data |= {name for file in defining for name in definitions[file].texts if _may_be_read(name)}
    contents = [(_shown(file, folder), shortened(file_sha256(file))) for file in sorted(defining | beside)]
    contents += [(name, content) for name in sorted(data) if (content := data_sha256(name)) is not None]
    files: Parts = {}
    for name, content in contents:
        files[name] = short_sha256([files[name], content]) if name in files else content  # of several folders
    return files


def _beside(place: Path, used: Sequence[Path]) -> Iterator[Path]:
    """Yields the files below a task's folder that its code may read.

    That is every file but other tasks. Of YAML files and what people put beside code only those count whose ending the
    code names, and so of all files where the run works below that folder; there it is also for the folder alone.
    """
    is_used = any(other.is_relative_to(place) for other in used)
    below = list(visible_files(place))
    near = {file for file in below if file.parent == place or not is_used}
    code = b"\n".join(file.read_bytes() for file in near if file.suffix == ".py")
    for file in below:
        named = file in near and (file.suffix or file.name).encode() in code
        usual = is_used or file.suffix in _YAML or any(fnmatch(file.name, pattern) for pattern in NO_PART)
        is_task = file.suffix in _YAML and _definition(file).names
        if file.suffix == ".py" or ((named or not usual) and not is_task):
            yield file


def _may_be_read(text: str) -> bool:
    """Whether a text that need not be a path may name a file, or with a slash a folder or pattern not around here."""
    place = os.path.expanduser(text)
    beginning = os.path.realpath(re.split(r"[*?[]", place)[0])
    return os.path.isfile(place) or ("/" in text and not Path.cwd().is_relative_to(beginning))


def data_sha256(name: str) -> str | None:
    """Returns the hash of a local file, or of the names and contents of a folder's or a pattern's files, None for none.

    The name may be a URL of a file, or one of something in an archive, whose hash it then is.

    Raises:
        OSError: a file cannot be read.
    """
    name = os.path.expanduser(_AROUND_A_PATH.sub("", name))
    place = Path(name)
    if os.path.isfile(name):
        return short_sha256([place.name, file_sha256(place)])
    if os.path.isdir(name):
        files = [(file.relative_to(place).as_posix(), file) for file in visible_files(place)]
    else:
        files = [(file, Path(file)) for file in sorted(glob.glob(str(place), recursive=True)) if Path(file).is_file()]
    return short_sha256([(shown, file_sha256(file)) for shown, file in files]) if files else None


def _within(value: Any) -> Iterator[Any]:
    """Yields a value and all within its lists and mappings; what YAML's aliases repeat comes once."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        yield (held := waiting.pop())
        if isinstance(held, dict | list) and id(held) not in seen:
            seen.add(id(held))
            waiting.extend(held.values() if isinstance(held, dict) else held)


def _strings(value: Any) -> list[str]:
    return [held for held in _within(value) if isinstance(held, str) and not _NO_NAME.search(held)]


def _yaml_files(name: str) -> Iterator[Path]:
    pattern = os.path.join(glob.escape(name), "*.yaml") if os.path.isdir(name) else name
    yield from filter(Path.is_file, map(Path, {name, *(glob.glob(pattern) if pattern.endswith(".yaml") else [])}))


def _definition(file: Path) -> _Definition:
    return _read(file, file_sha256(file))


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
        data=tuple(_strings([held.get(key) for held in mappings for key in _OF_A_TASK])),
        texts=tuple(_strings(settings)),
    )


def _defines(definition: _Definition, wanted: set[str]) -> bool:
    return definition.names is None or any(fnmatch(name, pattern) for name in definition.names for pattern in wanted)


def _shown(file: Path, folder: Path | None) -> str:
    place = file.parent if folder is None else folder.resolve()
    return part_name(file.relative_to(place).as_posix() if file.is_relative_to(place) else file.name)
