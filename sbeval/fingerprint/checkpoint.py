"""The parts of a checkpoint: every file that can decide what its model answers."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.fingerprint.parts import REVISION, Parts, named, part_name, shortened
from sbeval.foreign_files import read_json_object
from sbeval.hub_names import hub_commit, hub_folder
from sbeval.keeping.hashes import file_sha256, files_sha256

# what people and trainers put beside a model; every other file counts, since a file too few is a stale answer
NO_PART = (
    ".*",
    "*.md",
    "LICENSE*",
    "NOTICE*",
    "*.png",
    "*.jpg",
    "*.svg",
    "*.pdf",
    "*.log",
    "*.lock",
    "*.part",
    "*.partial",
    "*.pyc",
    "training_record.json",
    "trainer_state.json",
    "all_results.json",
    "train_results.json",
    "eval_results.json",
    "run.json",
    "runs.jsonl",
    "training_log.jsonl",
    "training_text-*.u64",
)
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# of a folder's own folders: code that other code imports, and chat templates
_DEEPER = (".py", ".jinja")


def checkpoint_parts(name: str, *, revision: str | None = None, subfolder: str = "") -> Parts:
    """Returns the parts of a checkpoint, an adapter or a tokenizer; none where nothing is there.

    Of a local folder these are its weights, its other files by name, and code or templates below it, all by content; of
    a hub id the commit that the hub's cache holds for the revision. Neither the folder's name nor the files' times
    count.

    Raises:
        OSError: a file cannot be read.
    """
    place = Path(os.path.expanduser(name))
    if place.is_file():
        return {part_name(place.name): shortened(file_sha256(place))}
    if place.is_dir():
        folder = place / subfolder
        parts = _folder_parts(place / subfolder)
        if subfolder:
            parts |= named("code above the subfolder", _code_below(place))
    else:
        commit = hub_commit(name, "models", revision)
        parts = {"hub id": f"{name}@{revision or 'main'}"}
        if commit is None:
            return parts
        parts[REVISION] = commit
        folder = hub_folder(name, "models") / "snapshots" / commit / subfolder
    settings = [_json(folder / file) for file in ("config.json", "tokenizer_config.json")]
    for repository in sorted({source for held in settings for source in _elsewhere(held.get("auto_map"))}):
        parts |= named(repository, _named_by_a_file(repository, _code_below))
    base = _json(folder / "adapter_config.json").get("base_model_name_or_path")
    if isinstance(base, str) and not settings[0]:  # transformers loads the model that an adapter alone names
        parts |= named("base model", _named_by_a_file(base, _folder_parts))
    return parts


def weight_files(folder: Path) -> list[Path]:
    """Returns a folder's weight files by name, those below it that an index names included; none without a folder."""
    if not folder.is_dir():
        return []
    files = {path for path in folder.iterdir() if path.suffix in WEIGHTS and path.is_file()}
    files |= {folder / shard for index in folder.glob("*.index.json") if index.is_file() for shard in _shards(index)}
    return sorted(path for path in files if path.is_file())


def weights_sha256(folder: Path) -> str | None:
    """Returns the hash over the names and contents of a folder's weight files, None where it holds none.

    Raises:
        OSError: one cannot be read.
    """
    if not (files := weight_files(folder)):
        return None
    digest = hashlib.sha256()
    for path, content in zip(files, files_sha256(files), strict=True):
        digest.update(os.fsencode(path.as_posix().removeprefix(f"{folder.as_posix()}/")))
        digest.update(bytes.fromhex(content))
    return digest.hexdigest()


def _shards(index: Path) -> set[str]:
    """Returns the files that an index of shards names; what is no index names none, and loading refuses it."""
    named = _json(index).get("weight_map")
    shards = named.values() if isinstance(named, dict) else ()
    return {shard for shard in shards if isinstance(shard, str) and "\0" not in shard}


def _named_by_a_file(name: str, read: Callable[[Path], Parts]) -> Parts:
    """Returns what `read` finds in a local folder, or the revision of a hub id."""
    folder = Path(os.path.expanduser(name))
    commit = hub_commit(name, "models")
    if folder.is_dir():
        return read(folder)
    return {REVISION: commit} if commit else {}


def _folder_parts(folder: Path) -> Parts:
    weights = weights_sha256(folder)
    parts = {"weights": shortened(weights)} if weights else {}
    held = set(weight_files(folder))
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if file.is_file() and file not in held and not any(fnmatch(file.name, known) for known in NO_PART):
            parts[part_name(file.name)] = shortened(file_sha256(file))
    return parts | _code_below(folder)


def _code_below(folder: Path) -> Parts:
    return {
        part_name(file.relative_to(folder).as_posix()): shortened(file_sha256(file))
        for file in visible_files(folder)
        if file.suffix in _DEEPER
    }


def visible_files(
    folder: Path, leaves_out: Callable[[str, Sequence[str]], bool] = lambda place, files: False
) -> Iterator[Path]:
    """Yields the files below a folder by name: not hidden ones, nor the compiled code that a run leaves.

    Links to folders are followed, each folder once. `leaves_out` is told the real path and the files of a folder below
    this one and says whether it is passed over.
    """
    seen = set(map(str, Path(os.path.realpath(folder)).parents))
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen or (place != str(folder) and leaves_out(real, files)):
            folders.clear()
            continue
        seen.add(real)
        # links first, so that one which leads elsewhere gives other names
        shown = (name for name in folders if not name.startswith("."))
        folders[:] = sorted(shown, key=lambda name: (not os.path.islink(os.path.join(place, name)), name))
        for name in sorted(files):
            if not name.startswith(".") and not name.endswith(".pyc") and os.path.isfile(os.path.join(place, name)):
                yield Path(place) / name


def _json(file: Path) -> Mapping[str, Any]:
    try:
        return read_json_object(file, "settings")
    except UserError:
        return {}


def _elsewhere(auto_map: Any) -> Iterator[str]:
    """Yields the repositories whose code a checkpoint's own `auto_map` names: "owner/name--module.Class"."""
    for value in auto_map.values() if isinstance(auto_map, dict) else []:
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str) and "--" in reference:
                yield reference.partition("--")[0]
