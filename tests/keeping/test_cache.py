"""One folder for what is kept between runs, and tables whose loss costs time alone."""

from pathlib import Path

import datasets
import pyarrow as pa
import pytest

from sbeval.errors import UserError
from sbeval.keeping.cache import cache_folder, keep_table, read_table


def test_the_folder_is_the_one_named_or_lies_beside_the_user_s_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", "~/kept")
    assert cache_folder("targets") == Path.home() / "kept" / "targets"
    monkeypatch.setenv("SBEVAL_CACHE", "~nobodyxx/kept")
    with pytest.raises(UserError, match="Expected a home folder for '~nobodyxx', found none"):
        cache_folder("targets")
    monkeypatch.delenv("SBEVAL_CACHE")
    assert cache_folder("ruler") == Path(datasets.config.HF_DATASETS_CACHE) / "sbeval" / "ruler"


def test_a_table_that_cannot_be_kept_or_read_is_no_error(tmp_path: Path) -> None:
    table = pa.table({"tokens": [1, 2]})
    keep_table(tmp_path / "kept" / "table.arrow", table)
    assert read_table(tmp_path / "kept" / "table.arrow") == table
    (tmp_path / "file").touch()
    keep_table(tmp_path / "file" / "table.arrow", table)
    assert read_table(tmp_path / "file") is None
    assert read_table(tmp_path / "nothing.arrow") is None
