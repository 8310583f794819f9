"""A file's hash is that of its content, whatever its size and times say, and a large file is read whole once."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from sbeval.keeping import hashes
from sbeval.keeping.hashes import file_sha256

BYTES = 400_000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every file of some 400 KB is large, and has not changed for as long as is asked for."""
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hashes, "KEPT_FROM_BYTES", BYTES)
    monkeypatch.setattr(hashes, "_SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(hashes, "_known", {})
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(random.Random(0).randbytes(BYTES))
    return path


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read whole."""
    names: list[str] = []
    digest = hashlib.file_digest
    monkeypatch.setattr(
        hashes.hashlib, "file_digest", lambda file, name: (names.append(Path(file.name).name), digest(file, name))[1]
    )
    return names


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "_known", {})


def true_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_large_file_is_read_once_for_all(file: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = {file_sha256(file)}
    for _ in range(3):
        another_process(monkeypatch)
        found.add(file_sha256(file))
    assert (found, read) == ({true_sha256(file)}, [file.name])


@pytest.mark.parametrize("place", [0, 1, BYTES // 2, BYTES - 1])
def test_a_change_with_size_and_time_kept_is_noticed(place: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, stat = file_sha256(file), file.stat()
    another_process(monkeypatch)
    with file.open("r+b") as stream:
        stream.seek(place)
        byte = stream.read(1)
        stream.seek(place)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert file_sha256(file) == true_sha256(file) != before


def test_where_every_time_was_put_back_the_blocks_read_tell(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = hashes._mark(file)
    monkeypatch.setattr(hashes, "_mark", lambda path: mark)
    before = file_sha256(file)
    for place in (0, BYTES // 2, BYTES - 1):
        another_process(monkeypatch)
        raw = bytearray(file.read_bytes())
        raw[max(0, place - 4096) : place + 4096] = bytes(len(raw[max(0, place - 4096) : place + 4096]))
        file.write_bytes(raw)
        assert file_sha256(file) == true_sha256(file) != before


def test_a_file_just_changed_is_read_each_time(file: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashes, "_SETTLED_SECONDS", 60.0)
    file_sha256(file)
    file_sha256(file)
    assert read == [file.name] * 2


def test_a_hash_that_cannot_be_kept_or_read_costs_time_alone(
    file: Path, cache: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file_sha256(file)
    (kept,) = (cache / "hashes").iterdir()
    for text in ("", "[]", '{"mark": 1}', '{"mark": ', kept.read_text().replace('"sha256": "', '"sha256": "0')[:-20]):
        another_process(monkeypatch)
        kept.write_text(text)
        assert file_sha256(file) == true_sha256(file)
    another_process(monkeypatch)
    (cache / "hashes").rename(cache / "elsewhere")
    (cache / "hashes").write_text("a file")
    assert file_sha256(file) == true_sha256(file)
    assert len(read) == 7


def test_processes_side_by_side_agree(file: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from sbeval.keeping import hashes; "
        "hashes._SETTLED_SECONDS = -1; hashes.KEPT_FROM_BYTES = 1; print(hashes.file_sha256(Path(sys.argv[1])))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert {process.communicate(timeout=600)[0].strip() for process in started} == {true_sha256(file)}
