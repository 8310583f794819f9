"""What a process keeps of files: a file that is rewritten under its old name is read again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from corpus_problems import byte_level_bpe
from ruler_problems import write_hotpot, write_labelled, write_long_bench

from sbeval.models.learned_positions import checkpoint_learned_positions
from sbeval.tasks.recall.labelled import load_labelled
from sbeval.tasks.recall.questions import associations, load_questions
from sbeval.tasks.ruler.qa import load_qa
from sbeval.tasks.ruler.texts import load_essays
from sbeval.tasks.tokens import load_counter


def _essays(path: Path, version: int) -> None:
    path.mkdir(exist_ok=True)
    (path / "one.txt").write_text(f"Essay number {version}.")


def _hotpot(path: Path, version: int) -> None:
    write_hotpot(path)
    path.write_text(path.read_text().replace("sold well", f"sold {version} times"))


def _associations(path: Path, version: int) -> None:
    rows = [{"shown": f"the tower {name}", "asked": f"{name * 2}{version}"} for name in "abcd"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _positions(path: Path, version: int) -> None:
    sizes = {"vocab_size": 64, "n_embd": 8, "n_layer": 1, "n_head": 1}
    transformers.GPT2Config(**sizes, n_positions=64 * version).save_pretrained(path)


def _tokenizer(path: Path, version: int) -> None:
    byte_level_bpe(["abc"], 300, adds_bos=version == 2).save_pretrained(path)


KEPT: dict[str, tuple[str, Callable[[Path, int], Any], Callable[[str], Any]]] = {
    "essays": ("essays", _essays, lambda path: load_essays(path).sha256),
    "questions": ("hotpot.json", _hotpot, lambda path: load_qa("hotpotqa", path).sha256),
    "labelled texts": (
        "labelled.jsonl",
        lambda path, version: write_labelled(path, rows=240 * version),
        lambda path: load_labelled("file", path).sha256,
    ),
    "LongBench v2": (
        "longbench.jsonl",
        lambda path, version: write_long_bench(path, rows=20 * version),
        lambda path: load_questions(path)[1],
    ),
    "associations": ("mine.jsonl", _associations, lambda path: associations(path)[1]),
    "learned positions": ("gpt2", _positions, checkpoint_learned_positions),
    "tokenizer": ("tokenizer", _tokenizer, lambda path: load_counter({"pretrained": path}, "task").sha256),
}


@pytest.mark.parametrize("kept", KEPT)
def test_a_rewritten_file_is_read_again_in_the_same_process(tmp_path: Path, kept: str) -> None:
    name, write, read = KEPT[kept]
    found = []
    for version in (1, 2, 1):
        write(tmp_path / name, version)
        found.append(read(str(tmp_path / name)))
        assert read(str(tmp_path / name)) == found[-1]
    assert found[0] == found[2] != found[1]


def test_a_tokenizer_is_loaded_once_while_its_files_stay(tmp_path: Path) -> None:
    _tokenizer(tmp_path, 1)
    first = load_counter({"pretrained": str(tmp_path)}, "task").tokenizer
    (tmp_path / "model.safetensors").write_bytes(b"weights are no part of a tokenizer")
    assert load_counter({"pretrained": str(tmp_path)}, "task").tokenizer is first
