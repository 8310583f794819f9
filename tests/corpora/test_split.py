"""Documents cut into smaller ones: nothing of the text is lost, and what cannot cut it says so."""

from pathlib import Path

import pytest
from corpus_problems import corpus_of, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from sbeval.corpora import corpus_sha256, local_corpus, split
from sbeval.corpora.split import Split, split_corpus
from sbeval.errors import UserError
from sbeval.settings import read_value


def pieces(texts: list[str], cut: str) -> list[str]:
    return [document.text for document in split_corpus(corpus_of(texts), cut, tiny_tokenizer()).documents()]


def test_paragraphs_are_what_blank_lines_part(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("one\ntwo\n\nthree\n \t\n\n  four\n")
    corpus = split_corpus(local_corpus(tmp_path / "own.txt"), "paragraph", None)
    assert [(document.name, document.text) for document in corpus.documents()] == [
        ("own.txt#1", "one\ntwo"),
        ("own.txt#2", "three"),
        ("own.txt#3", "four\n"),
    ]
    assert corpus.detail == "own.txt, split by paragraph"
    assert corpus_sha256(corpus) != corpus_sha256(local_corpus(tmp_path / "own.txt"))


@given(st.text(alphabet="ab \né😀", max_size=80), st.integers(1, 7), st.integers(1, 20))
def test_pieces_add_up_to_the_text_and_have_no_more_tokens_than_asked(text: str, tokens: int, characters: int) -> None:
    encode = tiny_tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "_CHARACTERS", characters)
        found = list(split._by_tokens(text, tokens, encode))
    assert "".join(found) == text
    # a character of several tokens is never cut
    assert all(len(encode(piece, add_special_tokens=False)["input_ids"]) < tokens + 4 for piece in found)


def test_pieces_of_one_read_have_the_tokens_of_the_whole_text() -> None:
    text = "the quick brown fox jumps over a lazy dog " * 30
    lengths = [len(tiny_tokenizer().encode(piece)) for piece in pieces([text, text], "16 tokens")]
    assert len(lengths) > 20
    assert set(lengths[: len(lengths) // 2 - 1]) == {16}


def test_an_expression_leaves_out_what_it_matches_and_a_look_ahead_leaves_out_nothing() -> None:
    text = "Chapter 1 a\nChapter 2 b\n"
    assert pieces([text], r"Chapter \d") == [" a\n", " b\n"]
    assert pieces([text], "(?=Chapter)") == ["Chapter 1 a\n", "Chapter 2 b\n"]


def test_what_matches_nowhere_is_said() -> None:
    with pytest.raises(UserError, match=r"split 'Part \\\\d' matches nowhere in the text 'small'"):
        pieces(["Chapter 1"], r"Part \d")


@pytest.mark.parametrize("value", [512, "", ["paragraph"], None, "paragraphs", "Paragraph", "(", "[a-"])
def test_what_is_no_split_is_refused(value: object) -> None:
    expected = "split to be paragraph, a number of tokens such as '512 tokens', or a regular expression, found"
    with pytest.raises(UserError, match=expected):
        read_value(Split, value, name="split")


def test_tokens_need_a_tokenizer_that_says_where_they_lie() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UserError, match="needs a tokenizer with character offsets"):
        split_corpus(corpus_of(["text"]), "4 tokens", Slow())
