"""Tokenizers, corpora and labelled texts made once a session, and a cache of the tests' own."""

from pathlib import Path
from typing import Any

import pytest
from ruler_problems import write_inputs


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="session")
def corpora(folder: Path) -> dict[str, Any]:
    return write_inputs(folder)


@pytest.fixture(autouse=True)
def cache(folder: Path, corpora: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", str(folder / "cache"))
