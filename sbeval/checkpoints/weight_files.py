"""The files that hold a checkpoint's weights, and the hash that tells one checkpoint from another."""

import hashlib
from pathlib import Path

_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weight_files(folder: Path) -> list[Path]:
    """Returns a folder's weight files by name; none where there is no such folder."""
    return sorted(path for path in folder.iterdir() if path.suffix in _ENDINGS) if folder.is_dir() else []


def weights_sha256(folder: Path) -> str | None:
    """Returns the hash over the names and contents of a folder's weight files, None where it holds none."""
    files = weight_files(folder)
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
