import bisect
import heapq
import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from folders import snapshot

from sbeval.corpora.archives import unpack
from sbeval.errors import UserError
from sbeval.training.prepare import DataRecipe, prepare
from sbeval.training.recipe import load_recipe
from sbeval.training.text.arrays import load_arrays
from sbeval.training.text.corpus import download, is_hand_written
from sbeval.training.tokenised import tokenise


def write_wheel(folder, name, version, files):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@pytest.fixture
def wheels(tmp_path, source_texts):
    own = {f"own/module_{index}.py": text for index, text in enumerate(source_texts)}
    copied = {"other/copy.py": source_texts[0], "other/_vendor/x.py": source_texts[1] + "\n# changed\n" * 9}
    library = {"other/stolen.py": Path(bisect.__file__).read_text()}
    write_wheel(tmp_path / "wheels", "own_package", "1.0", own)
    write_wheel(tmp_path / "wheels", "other", "2.1", copied | library)
    return tmp_path / "wheels"


@pytest.fixture
def library(tmp_path):
    folder = tmp_path / "library"
    folder.mkdir()
    for module in (bisect, heapq):
        shutil.copy(module.__file__, folder)
    return folder


def test_text_goes_from_wheels_to_arrays_without_what_is_held_out(tmp_path, wheels, library, source_texts):
    recipe = DataRecipe(packages=("own-package==1.0", "other==2.1"), package_bytes_max=10**7, vocabulary=400)
    packed = tmp_path / "data.tar"
    record = prepare(recipe, wheels, [library], packed)
    assert record["held_out"]["before"]["training_files_sharing_a_span"] >= 1
    assert record["held_out"]["after"]["training_files_sharing_a_span"] == 0
    assert record["held_out"]["after"]["share_of_held_out_spans"] == 0
    assert record["files"] <= len(source_texts)

    tokenise(packed, tmp_path / "arrays", length_tokens=64, recall_windows=8, seed=0)
    arrays = load_arrays(tmp_path / "arrays")
    assert int((arrays.tokens == 0).sum()) == record["files"]
    assert len(arrays.tokens) == record["unique_tokens"] == arrays.record["unique_tokens"]
    assert arrays.recall.shape == (8, 65)
    assert arrays.tokens.max() < 400

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arrays.tokenizer)
    end = int(np.argmax(arrays.tokens == 0))
    text = tokenizer.decode(arrays.tokens[:end].tolist())
    assert text in source_texts
    assert tokenizer("x = 4821973").input_ids[-7:] == [tokenizer.convert_tokens_to_ids(digit) for digit in "4821973"]
    assert tokenizer("x").input_ids[0] != tokenizer.bos_token_id


def test_a_damaged_file_is_refused(tmp_path, wheels, library):
    recipe = DataRecipe(packages=("own-package==1.0",), package_bytes_max=10**7, vocabulary=300)
    packed = tmp_path / "data.tar"
    prepare(recipe, wheels, [library], packed)
    with tarfile.open(packed) as archive:
        unpack(archive, tmp_path / "open")
    record = json.loads((tmp_path / "open/record.json").read_text())
    (tmp_path / "open/record.json").write_text(json.dumps(record | {"text_sha256": "0"}))
    with tarfile.open(packed, "w") as archive:
        for name in ("documents.xz", "tokenizer.json", "record.json"):
            archive.add(tmp_path / "open" / name, name)
    with pytest.raises(UserError, match="copy it again"):
        tokenise(packed, tmp_path / "arrays", length_tokens=64, recall_windows=0, seed=0)
    with pytest.raises(UserError, match="Expected packed training text"):
        tokenise(tmp_path / "absent.tar", tmp_path / "arrays", length_tokens=64, recall_windows=0, seed=0)


def test_nothing_is_overwritten_and_all_is_moved_aside_where_asked(tmp_path, wheels, library):
    recipe = DataRecipe(packages=("own-package==1.0",), package_bytes_max=10**7, vocabulary=300)
    packed, arrays = tmp_path / "data.tar", tmp_path / "arrays"
    packed.write_text("mine")
    with pytest.raises(UserError, match="Expected a new file"):
        prepare(recipe, wheels, [library], packed)
    prepare(recipe, wheels, [library], packed, replace=True)
    (aside,) = tmp_path.glob("data.tar.old-*")
    assert aside.read_text() == "mine"

    asked = {"length_tokens": 64, "recall_windows": 8, "seed": 0}
    made = tokenise(packed, arrays, **asked)
    before = snapshot(arrays)
    assert tokenise(packed, arrays, **asked) == made
    for other in ({"length_tokens": 32}, {"recall_windows": 4}, {"seed": 1}):
        with pytest.raises(UserError, match="holds the token arrays of this text"):
            tokenise(packed, arrays, **asked | other)
    assert snapshot(arrays) == before
    np.save(arrays / "recall.npy", np.zeros((8, 65), np.uint16))
    before = snapshot(arrays)
    with pytest.raises(UserError, match="holds the token arrays of this text"):
        tokenise(packed, arrays, **asked)
    assert snapshot(arrays) == before
    assert tokenise(packed, arrays, **asked, replace=True) == made
    (aside,) = tmp_path.glob("arrays.old-*")
    assert snapshot(aside) == before
    assert load_arrays(arrays).recall.max() > 0


def test_packages_must_be_pinned(tmp_path):
    with pytest.raises(UserError, match="name==version"):
        download(["sympy"], tmp_path)


def test_tables_and_generated_files_are_left_out(source_texts):
    assert all(is_hand_written(text) for text in source_texts if text and "generated" not in text[:600])
    assert not is_hand_written("TABLE = [\n" + "  0x1f, 0x2e, 12, 13, 14,\n" * 30 + "]\n")
    assert not is_hand_written("# Auto-generated by protoc, do not edit\nimport something\n")
    assert not is_hand_written("x=1;" * 200)


def test_the_shipped_data_recipe_is_pinned():
    recipe = load_recipe(DataRecipe, "demo_data")
    assert len(recipe.packages) == len(set(recipe.packages)) > 40
    assert all("==" in package for package in recipe.packages)
