"""One folder for what is kept between runs, and files that appear whole or not at all."""

import errno
import os
from pathlib import Path

import datasets
import pyarrow as pa
import pytest

from sbeval.errors import UserError
from sbeval.keeping.cache import cache_folder, keep_table, read_table
from sbeval.keeping.writing import whole_file


def test_the_folder_is_the_one_named_or_lies_beside_the_user_s_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", "~/kept")
    assert cache_folder("targets") == Path.home() / "kept" / "targets"
    monkeypatch.delenv("SBEVAL_CACHE")
    assert cache_folder("ruler") == Path(datasets.config.HF_DATASETS_CACHE) / "sbeval" / "ruler"


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "file.txt"
    with whole_file(path, "text") as part:
        part.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    assert os.listdir(path.parent) == ["file.txt"]


def write_half(path: Path, error: Exception) -> None:
    with whole_file(path, "text") as part:
        part.write_text("half")
        raise error


def test_a_block_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("before")
    with pytest.raises(ZeroDivisionError):
        write_half(tmp_path / "file.txt", ZeroDivisionError())
    assert os.listdir(tmp_path) == ["file.txt"]
    assert (tmp_path / "file.txt").read_text() == "before"


def test_a_full_disk_and_a_folder_that_is_a_file_are_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot keep text .*No space left on device\): set SBEVAL_CACHE"):
        write_half(tmp_path / "file.txt", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot keep text .*: set SBEVAL_CACHE"):
        write_half(tmp_path / "file" / "file.txt", ZeroDivisionError())


def test_a_table_that_cannot_be_kept_or_read_is_no_error(tmp_path: Path) -> None:
    table = pa.table({"tokens": [1, 2]})
    keep_table(tmp_path / "kept" / "table.arrow", table)
    assert read_table(tmp_path / "kept" / "table.arrow") == table
    (tmp_path / "file").touch()
    keep_table(tmp_path / "file" / "table.arrow", table)
    assert read_table(tmp_path / "file") is None
    assert read_table(tmp_path / "nothing.arrow") is None
