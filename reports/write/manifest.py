"""Which files of a folder a report wrote: names and hashes, so that a file of somebody else's is never replaced."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from sbeval.errors import UserError
from sbeval.keeping.writing import set_aside

MANIFEST = "sbeval-report.sha256"
"""Lines of a sha256 and a name. A name may have several: a kill leaves files of this report and of the one before."""
_LINE = re.compile("([0-9a-f]{64})  (.+)")


def refuse_others(folder: Path, names: Iterable[str]) -> None:
    """Raises a `UserError` that names the first file or folder of these names which no report left as it is."""
    for file in _others(folder, names):
        raise UserError(
            f"Expected a folder for the report without files of other origin, found {file}, which no report wrote, or "
            "which was changed since: name another folder, move that away, or have it moved aside with --replace."
        )


def add_manifest(part: Path, folder: Path, *, replace: bool) -> None:
    """Writes the manifest of a report's new files, which lie in `part` and belong in `folder`.

    What lies in their way and is somebody else's is refused, or with `replace` moved aside.

    Raises:
        UserError: something lies in their way, or it cannot be moved.
    """
    files = {str(file.relative_to(part)): _sha256(file) for file in sorted(part.rglob("*")) if file.is_file()}
    written = _written(folder)
    names = list(files) if written else [MANIFEST, *files]
    if replace:
        for file in _others(folder, names):
            set_aside(file)
    refuse_others(folder, names)
    lines = {f"{sha256}  {name}" for name, sha256 in files.items()}
    lines |= {
        f"{_sha256(folder / name)}  {name}" for name, known in written.items() if _is_one_of(folder / name, known)
    }
    (part / MANIFEST).write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")


def _others(folder: Path, names: Iterable[str]) -> list[Path]:
    written, names = _written(folder), list(names)
    parents = {folder / parent for name in names for parent in Path(name).parents[:-1]}
    there = [name for name in names if os.path.lexists(folder / name)]
    return [
        *sorted(parent for parent in parents if os.path.lexists(parent) and not parent.is_dir()),
        *(folder / name for name in there if not _is_one_of(folder / name, written.get(name, set()))),
    ]


def _is_one_of(file: Path, known: Set[str]) -> bool:
    return file.is_file() and not file.is_symlink() and _sha256(file) in known


def _written(folder: Path) -> Mapping[str, set[str]]:
    """Returns the hashes of what reports wrote to a folder, by name; nothing where no report did."""
    try:
        lines = (folder / MANIFEST).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return {}
    found: dict[str, set[str]] = {}
    for line in lines:
        if (parts := _LINE.fullmatch(line)) is None:  # somebody else's file
            return {}
        found.setdefault(parts[2], set()).add(parts[1])
    return found


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
