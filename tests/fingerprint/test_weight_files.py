"""The hash over a checkpoint's weight files."""

from pathlib import Path

import pytest

from sbeval.fingerprint.checkpoint import weight_files, weights_sha256


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.gguf"])
def test_the_hash_follows_names_and_contents_of_weights_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    before = weights_sha256(tmp_path)
    assert before is not None
    (tmp_path / "config.json").write_text('{"other": 1}', encoding="utf-8")
    assert weights_sha256(tmp_path) == before
    (tmp_path / name).write_bytes(b"others")
    other = weights_sha256(tmp_path)
    (tmp_path / name).write_bytes(b"weights")
    (tmp_path / name).rename(tmp_path / f"another_{name}")
    assert len({before, other, weights_sha256(tmp_path)}) == 3


def test_where_there_are_no_weights_there_is_no_hash(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for folder in (tmp_path, tmp_path / "missing", tmp_path / "config.json"):
        assert weight_files(folder) == []
        assert weights_sha256(folder) is None
