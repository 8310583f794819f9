import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import snapshot
from other_machines import assert_equal_but_for_rounding

from sbeval.checkpoints import load_checkpoint
from sbeval.checkpoints.convert import convert_checkpoint
from sbeval.errors import UserError
from tests.checkpoints.layouts import dolomite, save, tokens
from tests.checkpoints.test_load import llama

GROUPED: dict[str, Any] = {"model_type": "gpt_dolomite", "kv_heads": 2, "head_bias": True, "head_norm": True}


@pytest.mark.parametrize("tied", [False, True])
def test_a_converted_checkpoint_gives_the_same_logits(tied: bool, tmp_path: Path) -> None:
    source = save(tmp_path / "source", *dolomite(**GROUPED, tied=tied))
    (source / "tokenizer.json").write_text("{}")
    converted = convert_checkpoint(source, tmp_path / "converted", kv_expand="tile")
    assert converted.format == "dolomite:C"
    loaded = load_checkpoint(tmp_path / "converted")
    assert loaded.format == "sbeval"
    assert (tmp_path / "converted" / "tokenizer.json").read_text() == "{}"
    with torch.no_grad():
        assert_equal_but_for_rounding(loaded.model(tokens()).logits, converted.model(tokens()).logits)


def test_other_models_and_full_folders_are_refused(tmp_path: Path) -> None:
    llama(tmp_path / "llama")
    with pytest.raises(UserError, match="huggingface:llama cannot be converted"):
        convert_checkpoint(tmp_path / "llama", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="is not empty"):
        convert_checkpoint(save(tmp_path / "source", *dolomite()), tmp_path / "llama")


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
def test_a_folder_appears_whole_or_not_at_all(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path / "source", *dolomite())
    (source / "tokenizer.json").write_text("{}")
    destination = tmp_path / "converted"
    if there:
        destination.mkdir()
    before = snapshot(tmp_path)
    with monkeypatch.context() as full_disk:
        full_disk.setattr("shutil.copyfile", no_room)
        with pytest.raises(OSError, match="No space left"):
            convert_checkpoint(source, destination)
    assert snapshot(tmp_path) == before
    convert_checkpoint(source, destination)
    after = snapshot(tmp_path)
    assert {name for name in after if name.startswith("converted/")} == {
        f"converted/{name}" for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    }
    with pytest.raises(UserError, match="is not empty"):
        convert_checkpoint(source, destination)
    assert snapshot(tmp_path) == after


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
