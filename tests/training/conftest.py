import pytest
from training_problems import data_folder, source_texts  # noqa: F401


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))
