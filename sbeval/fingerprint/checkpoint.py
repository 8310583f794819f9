"""The fingerprint of a checkpoint: every file that can change its model's outputs."""

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

# irrelevant files that people and trainers put into a checkpoint's folder; every other file is a part of the
# fingerprint
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
# relevant files in subfolders: imported code and chat templates
_DEEPER = (".py", ".jinja")


def checkpoint_parts(name: str, *, revision: str | None = None, subfolder: str = "") -> Parts:
    """Returns the fingerprint of a checkpoint, an adapter or a tokenizer.

    For a local folder, the parts are hashes of its weights, of every other file, and of code and chat templates in
    subfolders. For a hub id, the part is the commit that the hub's local cache has for the revision. Folder names and
    modification times do not count.

    Args:
        name: a file, a folder or a hub id; if it does not exist, the result is empty.
        revision: revision of a hub id.
        subfolder: folder inside `name` that holds the checkpoint.

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
    for repository in sorted({source for values in settings for source in _code_repositories(values.get("auto_map"))}):
        parts |= named(repository, _referenced_parts(repository, _code_below))
    base = _json(folder / "adapter_config.json").get("base_model_name_or_path")
    if isinstance(base, str) and not settings[0]:  # an adapter: transformers loads the base model that it names
        parts |= named("base model", _referenced_parts(base, _folder_parts))
    return parts


def weight_files(folder: Path) -> list[Path]:
    """Returns a folder's weight files in order of their names, with shards in subfolders that an index names."""
    if not folder.is_dir():
        return []
    files = {path for path in folder.iterdir() if path.suffix in WEIGHTS and path.is_file()}
    files |= {folder / shard for index in folder.glob("*.index.json") if index.is_file() for shard in _shards(index)}
    return sorted(path for path in files if path.is_file())


def weights_sha256(folder: Path) -> str | None:
    """Returns the SHA-256 over names and contents of a folder's weight files, None if there are none.

    Raises:
        OSError: a file cannot be read.
    """
    files = weight_files(folder)
    if not files:
        return None
    digest = hashlib.sha256()
    for path, content in zip(files, files_sha256(files), strict=True):
        digest.update(os.fsencode(path.as_posix().removeprefix(f"{folder.as_posix()}/")))
        digest.update(bytes.fromhex(content))
    return digest.hexdigest()


def _shards(index: Path) -> set[str]:
    """Returns the shard files that an index lists; none if the index is damaged, which loading reports later."""
    weight_map = _json(index).get("weight_map")
    shards = weight_map.values() if isinstance(weight_map, dict) else ()
    return {shard for shard in shards if isinstance(shard, str) and "\0" not in shard}


def _referenced_parts(name: str, read: Callable[[Path], Parts]) -> Parts:
    """Returns the fingerprint that `read` computes of a local folder, or the commit of a hub id."""
    folder, commit = Path(os.path.expanduser(name)), hub_commit(name, "models")
    if folder.is_dir():
        return read(folder)
    return {REVISION: commit} if commit else {}


def _folder_parts(folder: Path) -> Parts:
    """Returns hashes of a folder's weights, other relevant files, and code in subfolders."""
    weights = weights_sha256(folder)
    parts = {"weights": shortened(weights)} if weights else {}
    weight_paths = set(weight_files(folder))
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if file.is_file() and file not in weight_paths and not any(fnmatch(file.name, known) for known in NO_PART):
            parts[part_name(file.name)] = shortened(file_sha256(file))
    return parts | _code_below(folder)


def _code_below(folder: Path) -> Parts:
    """Returns hashes of Python files and chat templates in a folder and its subfolders."""
    return {
        part_name(file.relative_to(folder).as_posix()): shortened(file_sha256(file))
        for file in visible_files(folder)
        if file.suffix in _DEEPER
    }


def visible_files(
    folder: Path, leaves_out: Callable[[str, Sequence[str]], bool] = lambda place, files: False
) -> Iterator[Path]:
    """Yields the files below a folder in order of their names, without hidden files and compiled Python code.

    Symbolic links to folders are followed, but no folder is visited twice.

    Args:
        folder: the folder.
        leaves_out: returns true for a subfolder to skip; its arguments are the subfolder's real path and file names.
    """
    seen = set(map(str, Path(os.path.realpath(folder)).parents))
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen or (place != str(folder) and leaves_out(real, files)):
            folders.clear()
            continue
        seen.add(real)
        # links first, so that retargeting a link changes the names of the files found through it
        visible = (name for name in folders if not name.startswith("."))
        folders[:] = sorted(visible, key=lambda name: (not os.path.islink(os.path.join(place, name)), name))
        for name in sorted(files):
            if not name.startswith(".") and not name.endswith(".pyc") and os.path.isfile(os.path.join(place, name)):
                yield Path(place) / name


def _json(file: Path) -> Mapping[str, Any]:
    """Reads a JSON object; an empty one if the file is missing or damaged."""
    try:
        return read_json_object(file, "settings")
    except UserError:
        return {}


def _code_repositories(auto_map: Any) -> Iterator[str]:
    """Yields the hub repositories from which `auto_map` takes remote code, as in "owner/name--module.Class"."""
    for value in auto_map.values() if isinstance(auto_map, dict) else []:
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str) and "--" in reference:
                yield reference.partition("--")[0]
