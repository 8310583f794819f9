"""What lies in a folder, to be compared before and after a command."""

import hashlib
from pathlib import Path


def snapshot(folder: Path, *, without: tuple[str, ...] = ("running.lock", "started.txt")) -> dict[str, tuple[int, str]]:
    """Returns size in bytes and sha256 of every file below a folder by its path there; a folder is an entry too."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            found[str(path.relative_to(folder))] = (-1, "folder")
        elif path.name not in without:
            content = path.read_bytes()
            found[str(path.relative_to(folder))] = (len(content), hashlib.sha256(content).hexdigest())
    return found


def below(found: dict[str, tuple[int, str]], folder: str) -> dict[str, tuple[int, str]]:
    """Returns the part of a snapshot below one of its folders."""
    return {name.removeprefix(f"{folder}/"): entry for name, entry in found.items() if name.startswith(f"{folder}/")}
