"""Splits documents into smaller ones: a long text is a single document, but a confidence interval needs twenty."""

import itertools
import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Annotated, Any

from sbeval.corpora.documents import Corpus, Document, make_document
from sbeval.errors import UserError
from sbeval.settings import Expected

PARAGRAPH = "paragraph"
_LINE_END = r"(?:\r\n|\n|\r(?!\n))"
_BLANK_LINES = re.compile(rf"{_LINE_END}[^\S\r\n]*{_LINE_END}\s*")
_TOKENS = re.compile(r"([1-9]\d*) tokens?", re.ASCII)
_CHARACTERS = 1_000_000
_EXPECTED = f"{PARAGRAPH}, a number of tokens such as '512 tokens', or a regular expression"


def _read(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    if value != PARAGRAPH and get_close_matches(value, [PARAGRAPH], cutoff=0.8):
        raise UserError(f"Expected split to be {_EXPECTED}, found {value!r}: did you mean {PARAGRAPH}?")
    try:
        re.compile(value)
    except re.error as error:
        raise UserError(f"Expected split to be {_EXPECTED}, found {value!r} ({error}): correct it.") from None
    return value


Split = Annotated[str, Expected(_EXPECTED, _read)]


def counts_tokens(split: str) -> bool:
    """Whether a value of `split` counts tokens, so that a tokenizer is needed."""
    return _TOKENS.fullmatch(split) is not None


def split_corpus(corpus: Corpus, split: str, tokenizer: Any) -> Corpus:
    """Splits the documents of a corpus into smaller ones.

    Args:
        corpus: the corpus.
        split: "paragraph" splits at blank lines, "512 tokens" after every 512 tokens, anything else is a regular
            expression that separates documents. Blank lines and matches are dropped; a lookahead such as
            `(?=Chapter)` matches before a word and drops nothing.
        tokenizer: counts tokens; used only if `split` is a number of tokens.

    Raises:
        UserError: documents are split by tokens with a tokenizer that returns no character offsets. Reading the
            documents raises it if the expression matches nowhere.
    """
    tokens = _TOKENS.fullmatch(split)
    if tokens and not tokenizer.is_fast:
        raise UserError(
            f"split {split!r} needs a tokenizer with character offsets (a fast tokenizer), and this one has none: "
            f"split by {PARAGRAPH} or by a regular expression."
        )
    pattern = _BLANK_LINES if split == PARAGRAPH else re.compile(split)

    def documents() -> Iterator[Document]:
        matches = bool(tokens) or split == PARAGRAPH
        for document in corpus.documents():
            text = document.text
            matches = matches or pattern.search(text) is not None
            texts = _by_tokens(text, int(tokens[1]), tokenizer) if tokens else _between(text, pattern)
            for number, part_text in enumerate(texts, start=1):
                if part_text.strip():
                    yield make_document(f"{document.name}#{number}", part_text)
        if not matches:
            raise UserError(
                f"split {split!r} matches nowhere in the text {corpus.name!r}: give {_EXPECTED} that matches."
            )

    detail = ", ".join(filter(None, (corpus.detail, f"split by {split}")))
    return corpus._replace(documents=documents, detail=detail)


def _between(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Yields the text before, between and after the matches of a pattern."""
    start = 0
    for match in pattern.finditer(text):
        yield text[start : match.start()]
        start = match.end()
    yield text[start:]


def _by_tokens(text: str, tokens: int, tokenizer: Any) -> Iterator[str]:
    """Splits a text after every `tokens` tokens.

    The text is encoded in chunks because character offsets need much memory. A chunk in which no split falls is encoded
    again with twice the length.
    """
    start, characters = 0, _CHARACTERS
    while start < len(text):
        chunk = text[start : start + characters]
        spans = tokenizer(chunk, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        cuts = [begin for begin, _ in spans[tokens::tokens]]
        is_last = start + len(chunk) == len(text)
        for first, last in itertools.pairwise([0, *cuts, *([len(chunk)] if is_last else [])]):
            yield chunk[first:last]
        read = len(chunk) if is_last else cuts[-1] if cuts else 0
        start, characters = start + read, _CHARACTERS if read else 2 * characters
