"""The hash of a file's content, read whole once and for a large file kept between processes."""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sbeval.errors import UserError
from sbeval.keeping.cache import cache_folder
from sbeval.keeping.writing import whole_file

KEPT_FROM_BYTES = 4 * 2**20
_BLOCKS, _BLOCK_BYTES = 64, 4096
# a change within one tick of the file system's clock, which is up to two seconds long, leaves the times as they were
_SETTLED_SECONDS = 3.0
_Mark = tuple[int, ...]
_known: dict[_Mark, tuple[str, str]] = {}


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content.

    A file that was hashed before is not read again while its device, inode, size, time of change and the inode's own
    time of change (ctime) stay the same, and so do 64 blocks of 4 KiB spread over it, which are read each time. Within
    one process this holds for every file, between processes for those of 4 MiB and more, whose hashes lie in the cache
    folder. A file that changed in the last 3 seconds is always read.

    What this can miss is a change outside those blocks after which somebody also put back the ctime. Writing, copying
    over and setting a file's times all renew it; only a clock set back, writing to the disk below the file system, or a
    network file system that keeps no ctime do not.

    Raises:
        OSError: it cannot be read.
    """
    mark = _mark(path)
    sample = _sample(path, mark[2])
    kept = _known.get(mark) or (_read(mark) if mark[2] >= KEPT_FROM_BYTES else None)
    if kept is not None and kept[1] == sample:
        _known[mark] = kept
        return kept[0]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _mark(path) == mark and time.time() - max(mark[3:]) / 1e9 > _SETTLED_SECONDS:
        _known[mark] = (digest, sample)
        if mark[2] >= KEPT_FROM_BYTES:
            _keep(mark, digest, sample)
    return digest


def files_sha256(paths: Iterable[Path]) -> list[str]:
    """Returns the SHA-256 of each file, several of them read side by side.

    Raises:
        OSError: one cannot be read.
    """
    with ThreadPoolExecutor() as threads:
        return list(threads.map(file_sha256, paths))


def _mark(path: Path) -> _Mark:
    stat = path.stat()
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _sample(path: Path, size_bytes: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for block in range(_BLOCKS):
            file.seek(max(0, size_bytes - _BLOCK_BYTES) * block // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK_BYTES))
            if size_bytes <= _BLOCK_BYTES:
                break
    return digest.hexdigest()


def _place(mark: _Mark) -> Path:
    return cache_folder("hashes") / f"{mark[0]}-{mark[1]}.json"


def _read(mark: _Mark) -> tuple[str, str] | None:
    try:
        kept = json.loads(_place(mark).read_text(encoding="utf-8"))
        return (str(kept["sha256"]), str(kept["sample"])) if kept["mark"] == list(mark) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(mark: _Mark, digest: str, sample: str) -> None:
    """Keeps a hash; where nothing can be written, the file is read again the next time."""
    with contextlib.suppress(UserError), whole_file(_place(mark), "the hash of a file") as new:
        new.write_text(json.dumps({"mark": mark, "sha256": digest, "sample": sample}), encoding="utf-8")
