"""A cache of each test's own."""

from pathlib import Path

import pytest

from sbeval.corpora import store


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_open", {})
