"""SHA-256 of files. Hashes of large files are stored in the cache folder, so that a file is read completely only once.

On two cores that other work kept busy, the first start with 7 GB of weights took 56 s (SHA-256 and a disk of 0.16
GB/s), and each later start 0.6 s (`python benchmarks/startup.py --weights-gb 7`).
"""

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
# file systems have clock ticks of up to two seconds; two changes within one tick leave the same times
_SETTLED_SECONDS = 3.0
_Mark = tuple[int, ...]
_known: dict[_Mark, tuple[str, str]] = {}


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content.

    A file that was hashed before is not read completely again if its device, inode, size, mtime and ctime are
    unchanged, and if a sample of its content is unchanged too: 64 blocks of 4 KiB, spread over the file. Hashes are
    remembered in the process for every file, and in the cache folder for files of 4 MiB and more. The hash of a file
    that changed in the last 3 seconds is not remembered, so the file is read again the next time.

    This misses only a change outside those blocks that leaves the ctime as it was. Writing, copying over a file and
    setting its times all renew the ctime. It stays the same only if the clock is set back, the disk is written to below
    the file system, or a network file system has no ctime.

    Raises:
        OSError: the file cannot be read.
    """
    mark = _mark(path)
    sample = _sample(path, mark[2])
    cached = _known.get(mark) or (_read(mark) if mark[2] >= KEPT_FROM_BYTES else None)
    if cached is not None and cached[1] == sample:
        _known[mark] = cached
        return cached[0]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _mark(path) == mark and time.time() - max(mark[3:]) / 1e9 > _SETTLED_SECONDS:
        _known[mark] = (digest, sample)
        if mark[2] >= KEPT_FROM_BYTES:
            _keep(mark, digest, sample)
    return digest


def files_sha256(paths: Iterable[Path]) -> list[str]:
    """Returns the SHA-256 of each file; threads read several files at once.

    Raises:
        OSError: a file cannot be read.
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
        record = json.loads(_place(mark).read_text(encoding="utf-8"))
        return (str(record["sha256"]), str(record["sample"])) if record["mark"] == list(mark) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(mark: _Mark, digest: str, sample: str) -> None:
    """Stores a hash in the cache folder. If the folder cannot be written to, the file is read again the next time."""
    with contextlib.suppress(UserError), whole_file(_place(mark), "the hash of a file") as temporary_path:
        temporary_path.write_text(json.dumps({"mark": mark, "sha256": digest, "sample": sample}), encoding="utf-8")
