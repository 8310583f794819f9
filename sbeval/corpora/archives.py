"""Unpacks tar archives safely on every supported Python version."""

import tarfile
from pathlib import Path
from typing import Any

from sbeval.errors import UserError


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Extracts an archive's files and folders into `folder`, which is created if it is missing.

    Raises:
        UserError: a member is neither file nor folder, or its path leads out of `folder`. In this case nothing is
            written.
    """
    root = folder.resolve()
    for member in archive.getmembers():
        if not (member.isfile() or member.isdir()) or not (root / member.name).resolve().is_relative_to(root):
            raise UserError(
                f"The archive holds {member.name!r}, which is no file below its folder; create or download it again"
            )
    # Python 3.11.4 added the argument `filter`; later versions warn without it
    safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    folder.mkdir(parents=True, exist_ok=True)
    archive.extractall(folder, **safe)  # noqa: S202  every member was checked above
