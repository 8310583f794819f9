import pytest
from training_problems import data_folder, save_parent, source_texts  # noqa: F401


@pytest.fixture(scope="session")
def parent(tmp_path_factory, data_folder):  # noqa: F811
    return save_parent(tmp_path_factory.mktemp("parents") / "parent", data_folder)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SBEVAL_CACHE", str(tmp_path / "cache"))
