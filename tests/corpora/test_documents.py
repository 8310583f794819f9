"""Text sources: their documents and the order of these, and their errors for bad input."""

import codecs
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.task import Task

from sbeval.corpora import (
    KNOWN,
    corpus_sha256,
    count_words,
    hub_corpus,
    hub_text,
    local,
    local_corpus,
    local_pairs,
    make_document,
    split_wikitext_pages,
    stdlib_corpus,
    text_name,
    wikitext_corpus,
)
from sbeval.corpora.split import split_corpus
from sbeval.errors import UserError

WIKITEXT = """ \n = First = \n \n Text of the first .\n = = Section = = \n = = = Subsection = = = \n = not a heading
 = Second page = \n \n Text of the second .\n"""


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
    assert "3." in corpus.detail


def test_text_file_is_one_document_and_jsonl_one_a_line_and_hidden_files_are_none(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"one\r\ntwo")
    (tmp_path / "a.jsonl").write_text('{"text": "x y"}\n\n"z"\n{"text": " "}\n"\\ud83d\\ude00"\n')
    (tmp_path / ".git").mkdir()
    for name in (".DS_Store", ".git/index"):
        (tmp_path / name).write_bytes(b"\0\1")
    *lines, text = ((document.name, document.text) for document in local_corpus(tmp_path).documents())
    assert lines == [("a.jsonl:1", "x y"), ("a.jsonl:3", "z"), ("a.jsonl:5", "\U0001f600")]
    assert text == ("b.txt", "one\r\ntwo")


@pytest.mark.parametrize(
    ("file", "name"),
    [
        *(("poems.txt", "poems"), ("poems.jsonl.zst", "poems"), ("v1.2.parquet", "v1.2"), ("POEMS.TXT", "POEMS")),
        *(("poems.gz", "poems"), ("notes.md", "notes.md"), ("poems", "poems"), (".txt", ".txt")),
    ],
)
def test_a_text_is_named_without_the_endings_that_say_how_it_is_stored(file: str, name: str) -> None:
    assert text_name(Path("folder") / file) == name


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
        ("empty.txt", b"", "holds no text"),
        ("latin.txt", "caf\xe9".encode("latin-1"), "0xe9 at 3"),
        ("binary.txt", b"a\0b", "binary"),
        ("program", b"\x7fELF\x02\0\xff\xd0", "binary"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": ', "Line 2 of"),
        ("field.jsonl", json.dumps({"body": "a"}).encode(), "text_field"),
        ("half.jsonl", b'{"text": "a"}\n{"text": "cut \\ud83d"}\n', "Line 2 of .*surrogate"),
        ("deep.jsonl", b"[" * 100_000, "Line 1 of"),
    ],
)
def test_bad_files_are_one_clear_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        list(local_corpus(tmp_path / name).documents())
    assert name in str(error.value)


@pytest.mark.parametrize(
    ("kind", "end"), [*((kind, end) for kind in ("txt", "jsonl") for end in ("", ".zst", ".gz")), ("parquet", "")]
)
def test_every_format_gives_the_same_documents(tmp_path: Path, kind: str, end: str) -> None:
    texts = ["one é\n", "two", "three 😀"] if kind != "txt" else ["one é\ntwo\n"]
    plain = tmp_path / f"a.{kind}"
    if kind == "txt":
        plain.write_text(texts[0], encoding="utf-8")
    elif kind == "jsonl":
        plain.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    else:
        pq.write_table(pa.table({"other": [1, 2, 3], "body": texts}), plain)
    if end:
        with pa.output_stream(f"{plain}{end}", compression={".zst": "zstd", ".gz": "gzip"}[end]) as stream:
            stream.write(plain.read_bytes())
    corpus = local_corpus(Path(f"{plain}{end}"), text_field="body")
    assert [document.text for document in corpus.documents()] == texts
    assert len({document.name for document in corpus.documents()}) == len(texts)


def write_split(folder: Path, split: str, columns: dict[str, list[object]]) -> Path:
    (folder / "data").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


def test_a_hub_dataset_is_one_document_a_row(tmp_path: Path) -> None:
    source = hub_text(str(write_split(tmp_path, "train", {"body": ["one", "", "two"]})), text_field="body")
    shown = [(d.name, d.text) for d in hub_corpus(source, name="x").documents()]
    assert shown == [("000000", "one"), ("000002", "two")]
    for broken, message in ((replace(source, split="test"), "test"), (replace(source, text_field="text"), "body")):
        with pytest.raises(UserError, match=message):
            list(hub_corpus(broken, name="x").documents())
    empty = hub_text(str(write_split(tmp_path / "empty", "train", {"text": ["", None, " "]})))
    with pytest.raises(UserError, match="holds no text"):
        list(hub_corpus(empty, name="x").documents())


def test_narrativeqas_books_are_taken_once_and_without_its_films(tmp_path: Path) -> None:
    books: list[object] = [
        {"id": name, "kind": kind, "text": f"text of {name}", "summary": {"text": "short"}}
        for name, kind in (("b1", "gutenberg"), ("b1", "gutenberg"), ("f1", "movie"), ("b2", "gutenberg"))
    ]
    columns = {"document": books, "question": [{"text": "who?"}] * 4}
    folder = write_split(tmp_path / "deepmind" / "narrativeqa", "test", columns)
    corpus = hub_corpus(hub_text(str(folder)), name="text")
    assert [(d.name, d.text) for d in corpus.documents()] == [("b1", "text of b1"), ("b2", "text of b2")]


@pytest.mark.parametrize(
    ("name", "split", "columns"),
    [
        ("codeparrot/codeparrot-clean-valid", "train", {"repo_name": ["r"], "size": ["3"], "content": ["x"]}),
        ("emozilla/pg19-test", "test", {"short_book_title": ["t"], "publication_date": [1900], "text": ["x"]}),
        ("NeelNanda/pile-10k", "train", {"text": ["x"], "meta": [{"pile_set_name": "s"}]}),
    ],
    ids=["CodeParrot", "PG-19", "pile-10k"],
)
def test_known_datasets_are_read_in_the_layout_of_their_cards(
    tmp_path: Path, name: str, split: str, columns: dict[str, list[object]]
) -> None:
    folder = write_split(tmp_path / name, split, columns)
    assert [document.text for document in hub_corpus(hub_text(str(folder)), name="text").documents()] == ["x"]
    assert hub_text(name).path == name in KNOWN


def test_a_document_too_long_for_memory_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "MOST_DOCUMENT_BYTES", 2**16)
    (tmp_path / "a.jsonl").write_text(json.dumps("x" * 2**16) + "\n")
    (tmp_path / "a.txt").write_text("x" * (2**16 + 1))
    for name in ("a.jsonl", "a.txt", "line.txt", "line.jsonl"):
        if name.startswith("line"):
            with (tmp_path / name).open("wb") as file:
                file.truncate(2 * 2**30)  # takes no space on disk
        with pytest.raises(UserError, match="split it") as error:
            list(local_corpus(tmp_path / name).documents())
        assert name in str(error.value)


def test_files_that_are_not_what_their_name_says_or_not_there(tmp_path: Path) -> None:
    for place in (Path("/proc/self/mem"), tmp_path / "nowhere.txt"):
        with pytest.raises(UserError, match=str(place)):
            list(local_corpus(place).documents())
    for name in ("a.parquet", "a.txt.zst", "a.txt.gz"):
        (tmp_path / name).write_bytes(b"plain text")
        with pytest.raises(UserError, match=name):
            list(local_corpus(tmp_path / name).documents())
    for columns in ({"body": ["one"]}, {"text": [1, 2]}, {"text": [["one"]]}):
        pq.write_table(pa.table(columns), tmp_path / "c.parquet")
        with pytest.raises(UserError, match=r"\['body'\]" if "body" in columns else r"values of type (int64|list)"):
            list(local_corpus(tmp_path / "c.parquet").documents())


PIECES = ["a", "\u00e9", " ", "\n", "\r", "\r\n"]


def write_text(folder: Path, kind: str, text: str) -> Path:
    """Writes a text as one document of a kind of file, without what the platform does to line ends."""
    path = folder / f"text{kind}"
    if kind == ".parquet":
        pq.write_table(pa.table({"text": [text]}), path)
    elif kind.startswith(".jsonl"):
        raw = json.dumps({"text": text}).encode() + b"\n"
        path.write_bytes(gzip.compress(raw) if kind.endswith(".gz") else raw)
    else:
        path.write_bytes(gzip.compress(text.encode()) if kind.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("kind", [".txt", ".md", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet"])
@given(text=st.lists(st.sampled_from(PIECES)).map(lambda pieces: "x" + "".join(pieces)), marked=st.booleans())
def test_line_ends_are_kept_and_a_byte_order_mark_is_no_text(
    tmp_path_factory: pytest.TempPathFactory, kind: str, text: str, marked: bool
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    for place in (write_text(folder, kind, "\ufeff" * marked + text), folder):
        corpus = local_corpus(place)
        (document,) = corpus.documents()
        assert document.text == text
        assert document.original_bytes == len(text.encode())
        told = "byte order mark left out in 1 document" if marked else None
        assert corpus.recorded_detail() == ", ".join(filter(None, (place.name, told)))
        assert corpus_sha256(corpus) == corpus_sha256(local_corpus(place))


def test_a_mark_in_front_of_a_file_of_lines_and_of_pairs_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'{"text": "one"}\n{"text": "\\ufefftwo"}\n')
    assert [document.text for document in local_corpus(path).documents()] == ["one", "two"]
    path.write_bytes(codecs.BOM_UTF8 + b'{"a": "\\ufeffone", "b": "two"}\n')
    assert list(local_pairs(path, "a", "b")) == [("lines.jsonl:1", "one", "two")]
    path.write_bytes(codecs.BOM_UTF8)
    with pytest.raises(UserError, match="holds no text"):
        list(local_corpus(path.rename(tmp_path / "mark.txt")).documents())


@pytest.mark.parametrize("name", ["text.txt", "text.jsonl", "text.txt.gz"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_text_in_another_encoding_is_refused_by_its_name(tmp_path: Path, encoding: str, name: str) -> None:
    raw = '\ufeff"text"\n'.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    with pytest.raises(UserError, match=f"encoded in {encoding[:6].upper()}, .*iconv -f {encoding[:6].upper()}"):
        list(local_corpus(tmp_path / name).documents())


def test_sources_keep_their_line_ends_and_lose_their_mark(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(codecs.BOM_UTF8 + b"x = 1\r\ny = 2\r\n")
    (tmp_path / "b.py").write_bytes(b"# coding: latin-1\n# \xe9\n")
    library = stdlib_corpus(tmp_path)
    assert {document.text for document in library.documents()} == {
        "x = 1\r\ny = 2\r\n",
        "# coding: latin-1\n# \u00e9\n",
    }
    assert str(library.recorded_detail()).endswith("byte order mark left out in 1 document")


def test_paragraphs_end_at_blank_lines_of_every_kind(tmp_path: Path) -> None:
    pieces = []
    for end in ("\n", "\r\n", "\r"):
        path = tmp_path / "text.txt"
        path.write_bytes("one\ntwo\n \n\nthree\n\nfour".replace("\n", end).encode())
        corpus = split_corpus(local_corpus(path), "paragraph", None)
        pieces.append([document.text.replace(end, "\n") for document in corpus.documents()])
    assert pieces == [["one\ntwo", "three", "four"]] * 3
