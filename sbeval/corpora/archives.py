"""Unpacking of tar archives on every Python that this package runs on."""

import tarfile
from pathlib import Path
from typing import Any

from sbeval.errors import UserError


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Writes an archive's files and folders below `folder`, which is made where it is missing.

    Raises:
        UserError: a member is no file or folder, or its name leads out of `folder`. Nothing is written then.
    """
    root = folder.resolve()
    for member in archive.getmembers():
        if not (member.isfile() or member.isdir()) or not (root / member.name).resolve().is_relative_to(root):
            raise UserError(
                f"Expected an archive of files below one folder, found {member.name!r}; make or fetch it anew"
            )
    # Python 3.11.4 brought the filter, later versions warn where none is chosen
    safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    folder.mkdir(parents=True, exist_ok=True)
    archive.extractall(folder, **safe)  # noqa: S202  every member was looked at above
