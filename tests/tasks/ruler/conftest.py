"""Inputs made once a session, and a cache of the tests' own."""

from pathlib import Path
from typing import Any

import pytest
from ruler_problems import write_inputs


@pytest.fixture(scope="session")
def ruler_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ruler")


@pytest.fixture(scope="session")
def corpora(ruler_folder: Path) -> dict[str, Any]:
    return write_inputs(ruler_folder)


@pytest.fixture(autouse=True)
def cache(ruler_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBEVAL_CACHE", str(ruler_folder / "cache"))
