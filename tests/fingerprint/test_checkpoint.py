"""In every layout of a checkpoint, each file that counts changes the part of its name, and a copy changes none."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from sbeval.fingerprint.checkpoint import checkpoint_parts, weight_files, weights_sha256
from sbeval.fingerprint.parts import changes

COMMIT = "c" * 40
INDEX = json.dumps({"weight_map": {"a": "one.safetensors", "b": "deep/er/two.safetensors", "c": 3, "d": None}})
# for each layout its files, and the part that each of them is, None where it is none
LAYOUTS: dict[str, dict[str, str | None]] = {
    "one file": {"model.safetensors": "weights", "config.json": "config.json", "README.md": None},
    "pickled": {"pytorch_model.bin": "weights", "config.json": "config.json", "trainer_state.json": None},
    "shards": {
        "model.safetensors.index.json": "model.safetensors.index.json",
        "one.safetensors": "weights",
        "deep/er/two.safetensors": "weights",
        "deep/er/unnamed.safetensors": None,
    },
    "gguf": {"model.Q4.gguf": "weights"},
    "own code": {"modeling.py": "modeling.py", "kernels/fast.py": "kernels/fast.py", ".git/hook.py": None},
    "tokenizer": {
        "tokenizer.model": "tokenizer.model",
        "vocab.bpe": "vocab.bpe",
        "chat_template.jinja": "chat_template",
    },
    "adapter alone": {
        "adapter_config.json": "adapter_config.json",
        "adapter_model.bin": "weights",
        "../base/model.safetensors": "base model: weights",
        "../base/config.json": "base model: config.json",
    },
    "states of training beside it": {"model.safetensors": "weights", "checkpoint-10/model.safetensors": None},
}


def content(file: str, place: Path) -> str:
    if file.endswith("index.json"):
        return INDEX
    if file == "adapter_config.json":
        return json.dumps({"base_model_name_or_path": str(place / "base")})
    return "{}"


def made(layout: str, place: Path) -> Path:
    for file in LAYOUTS[layout]:
        path = place / "ckpt" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content(file, place))
    return place / "ckpt"


@pytest.mark.parametrize(("layout", "file"), [(layout, file) for layout in LAYOUTS for file in LAYOUTS[layout]])
def test_a_file_changes_the_part_of_its_name_and_a_copy_none(layout: str, file: str, tmp_path: Path) -> None:
    folder = made(layout, tmp_path)
    before = checkpoint_parts(str(folder))
    shutil.copytree(folder, tmp_path / "copy")
    assert checkpoint_parts(str(tmp_path / "copy")) == before
    (folder / file).write_text(content(file, tmp_path) + " ")
    part, found = LAYOUTS[layout][file], changes(before, checkpoint_parts(str(folder)))
    assert found is None if part is None else str(found).startswith(part) and ";" not in str(found)


def test_of_a_subfolder_code_above_it_counts_and_other_weights_do_not(tmp_path: Path) -> None:
    for file in ("small/config.json", "small/model.safetensors", "modeling.py", "model.safetensors"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    before = checkpoint_parts(str(tmp_path), subfolder="small")
    (tmp_path / "model.safetensors").write_text("other")
    assert checkpoint_parts(str(tmp_path), subfolder="small") == before
    (tmp_path / "modeling.py").write_text("other")
    found = changes(before, checkpoint_parts(str(tmp_path), subfolder="small"))
    assert found == "code above the subfolder: modeling.py changed"


@pytest.mark.parametrize("name", ["~nobody-of-that-name/x", "x\0y", "someone/not-there", "a/b/c"])
def test_what_is_no_folder_is_known_by_its_name(name: str) -> None:
    assert checkpoint_parts(name) == {"hub id": f"{name}@main"}


def test_of_a_hub_id_the_commit_counts_and_that_of_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert checkpoint_parts("someone/model") == {"hub id": "someone/model@main"}
    snapshot = tmp_path / "models--someone--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "someone/code--own.Own"}}))
    for name, commit in (("model", COMMIT), ("code", "d" * 40)):
        refs = tmp_path / f"models--someone--{name}" / "refs"
        refs.mkdir(parents=True)
        (refs / "main").write_text(commit)
    known = {"hub id": "someone/model@main", "revision": COMMIT, "someone/code: revision": "d" * 40}
    assert checkpoint_parts("someone/model") == known
    assert checkpoint_parts("someone/model", revision=COMMIT)["revision"] == COMMIT


def test_a_damaged_or_hostile_file_is_content_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": 3}')
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../../../etc\\u0000", "b": []}}')
    names = {"config.json", "adapter_config.json", "model.safetensors.index.json"}
    assert checkpoint_parts(str(tmp_path)).keys() == names


def test_the_hash_follows_the_names_of_weights_and_is_none_where_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    for folder in (tmp_path, tmp_path / "missing", tmp_path / "config.json"):
        assert weight_files(folder) == []
        assert weights_sha256(folder) is None
    hashes = set()
    for name in ("model.safetensors", "pytorch_model.bin", "model.gguf"):
        (tmp_path / name).write_bytes(b"weights")
        hashes.add(weights_sha256(tmp_path))
        (tmp_path / name).unlink()
    assert None not in hashes
    assert len(hashes) == 3
