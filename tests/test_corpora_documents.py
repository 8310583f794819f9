"""Text sources: which documents they give, in which order, and what they say about bad input."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.task import Task

from sbeval.corpora import (
    corpus_sha256,
    count_words,
    local_corpus,
    make_document,
    split_wikitext_pages,
    stdlib_corpus,
    wikitext_corpus,
)
from sbeval.errors import UserError

WIKITEXT = "\n".join(
    [
        " ",
        " = First = ",
        " ",
        " Text of the first .",
        " = = Section = = ",
        " = = = Subsection = = = ",
        " = not a heading",
        " = Second page = ",
        " ",
        " Text of the second .",
        "",
    ]
)


@given(st.text())
def test_words_and_bytes_are_counted_as_lm_eval_counts_them(text: str) -> None:
    document = make_document("d", text)
    assert document.original_words == count_words(text) == Task.count_words(text)
    assert document.original_bytes == len(text.encode("utf-8", "surrogatepass"))


def test_wikitext_splits_at_level_1_headings_alone() -> None:
    pages = list(split_wikitext_pages(WIKITEXT))
    assert [page.splitlines()[0] for page in pages] == [" = First = ", " = Second page = "]
    assert "".join(WIKITEXT.split()) == "".join("".join(pages).split())


def test_wikitext_counts_words_before_detokenising() -> None:
    corpus = wikitext_corpus(lambda: split_wikitext_pages(WIKITEXT), detokenize=lambda page: page.replace(" .", "."))
    first = next(corpus.documents())
    assert first.name == "000 First"
    assert first.original_words == count_words(next(split_wikitext_pages(WIKITEXT))) == count_words(first.text) + 1


def test_stdlib_leaves_folders_out_and_orders_by_hash(tmp_path: Path) -> None:
    for path in ("a.py", "b.py", "email/c.py", "test/d.py", "email/tests/e.py", "encodings/f.py", "empty.py"):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("" if path == "empty.py" else f"# {path}\n")
    names = [document.name for document in stdlib_corpus(tmp_path).documents()]
    assert sorted(names) == ["a.py", "b.py", "email/c.py"]
    (tmp_path / "z.py").write_text("# later\n")
    assert [name for name in (d.name for d in stdlib_corpus(tmp_path).documents()) if name != "z.py"] == names


def test_stdlib_of_this_interpreter_is_large_and_says_its_version() -> None:
    corpus = stdlib_corpus()
    names = [document.name for document in corpus.documents()]
    assert len(names) > 200
    assert "argparse.py" in names
    assert not [name for name in names if name.startswith(("test/", "idlelib/", "encodings/"))]
    assert corpus.detail is not None
    assert "3." in corpus.detail


def test_text_file_is_one_document_and_jsonl_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"one\r\ntwo")
    (tmp_path / "a.jsonl").write_text('{"text": "x y"}\n\n"z"\n{"text": " "}\n')
    documents = list(local_corpus(tmp_path).documents())
    assert [(d.name, d.text) for d in documents] == [("a.jsonl:1", "x y"), ("a.jsonl:3", "z"), ("b.txt", "one\ntwo")]


def test_hash_follows_text_names_and_order(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    first = corpus_sha256(local_corpus(tmp_path))
    assert corpus_sha256(local_corpus(tmp_path)) == first
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    second = corpus_sha256(local_corpus(tmp_path))
    (tmp_path / "b.txt").write_text("ono")
    assert len({first, second, corpus_sha256(local_corpus(tmp_path))}) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "found none"),
        ("latin.txt", "caf\xe9".encode("latin-1"), "0xe9 at 3"),
        ("binary.txt", b"a\0b", "binary"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', "line 2"),
        ("field.jsonl", json.dumps({"body": "a"}).encode(), "rename the field"),
    ],
)
def test_bad_files_are_one_clear_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        list(local_corpus(tmp_path / name).documents())
    assert name in str(error.value)


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        local_corpus(tmp_path / "nowhere.txt")
