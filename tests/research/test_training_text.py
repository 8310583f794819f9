import bisect
import heapq
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.training_text.decontamination import SpanIndex, near_duplicates
from research.training_text.prepare import DataRecipe, prepare
from research.training_text.tokenised import tokenise
from sbeval.training.arrays import load_arrays

pytestmark = pytest.mark.exhaustive


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
    assert tokenizer.decode(arrays.tokens[:end].tolist()) in source_texts
    assert tokenizer("x = 4821973").input_ids[-7:] == [tokenizer.convert_tokens_to_ids(digit) for digit in "4821973"]
    assert tokenizer("x").input_ids[0] != tokenizer.bos_token_id


SPAN = 5
small_text = st.lists(st.integers(0, 2), max_size=60).map(lambda ids: np.array(ids, np.uint16))


def spans(tokens: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + SPAN].tolist()) for start in range(len(tokens) - SPAN + 1)]


@given(held_out=st.lists(small_text, max_size=4), training=small_text)
def test_shared_spans_are_those_a_plain_search_finds(held_out, training):
    index = SpanIndex(held_out, SPAN)
    known = {span for tokens in held_out for span in spans(tokens)}
    assert len(index) == len(known)
    assert index.shared_spans(training) == sum(span in known for span in spans(training))


def test_later_copies_are_marked_and_the_first_stays():
    draw = np.random.default_rng(1)
    first, other = draw.integers(0, 4096, (2, 3000)).astype(np.uint16)
    edited = first.copy()
    edited[1500:1510] = 7
    assert near_duplicates([first, other, edited, other[:1000]]).tolist() == [False, False, True, True]
