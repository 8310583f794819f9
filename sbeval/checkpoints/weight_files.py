"""The files that hold a checkpoint's weights, and the hash that tells one checkpoint from another."""

import hashlib
import json
import os
from pathlib import Path

from sbeval.keeping.hashes import files_sha256

_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weight_files(folder: Path) -> list[Path]:
    """Returns a folder's weight files by name, those below it that an index names included; none without a folder."""
    if not folder.is_dir():
        return []
    files = {path for path in folder.iterdir() if path.suffix in _ENDINGS and path.is_file()}
    files |= {folder / shard for index in folder.glob("*.index.json") if index.is_file() for shard in _shards(index)}
    return sorted(path for path in files if path.is_file())


def weights_sha256(folder: Path) -> str | None:
    """Returns the hash over the names and contents of a folder's weight files, None where it holds none.

    Raises:
        OSError: one cannot be read.
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
    """Returns the files that an index of shards names; what is no index names none, and loading refuses it."""
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
    return {shard for shard in named if isinstance(shard, str) and "\0" not in shard}
