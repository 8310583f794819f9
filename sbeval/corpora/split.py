"""Documents cut into smaller ones, since one long text is one document and an interval needs twenty."""

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
    """Whether documents are split by tokens, for which a tokenizer is needed."""
    return _TOKENS.fullmatch(split) is not None


def split_corpus(corpus: Corpus, split: str, tokenizer: Any) -> Corpus:
    """Returns a corpus whose documents are pieces of another's.

    "paragraph" cuts at blank lines, "512 tokens" after every 512 tokens of the model's tokenizer, a regular expression
    where it matches. Blank lines and what matches the expression are left out; `(?=Chapter)` leaves out nothing.

    Raises:
        UserError: documents are split by tokens and the tokenizer does not say where they lie; or, when the documents
            are read, an expression matches nowhere.
    """
    tokens = _TOKENS.fullmatch(split)
    if tokens and not tokenizer.is_fast:
        raise UserError(
            f"Expected a tokenizer that says where its tokens lie for split {split!r}, found one that does not: split "
            f"by {PARAGRAPH} or by a regular expression."
        )
    pattern = _BLANK_LINES if split == PARAGRAPH else re.compile(split)

    def documents() -> Iterator[Document]:
        matches = bool(tokens) or split == PARAGRAPH
        for document in corpus.documents():
            text = document.text
            matches = matches or pattern.search(text) is not None
            pieces = _by_tokens(text, int(tokens[1]), tokenizer) if tokens else _between(text, pattern)
            for number, piece in enumerate(pieces, start=1):
                if piece.strip():
                    yield make_document(f"{document.name}#{number}", piece)
        if not matches:
            raise UserError(
                f"Expected split {split!r} to match in the text {corpus.name!r}, found that it matches nowhere: give "
                f"{_EXPECTED} that does."
            )

    detail = ", ".join(filter(None, (corpus.detail, f"split by {split}")))
    return corpus._replace(documents=documents, detail=detail)


def _between(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    start = 0
    for match in pattern.finditer(text):
        yield text[start : match.start()]
        start = match.end()
    yield text[start:]


def _by_tokens(text: str, tokens: int, tokenizer: Any) -> Iterator[str]:
    """Yields pieces that add up to the text, of which a part at a time is encoded: offsets take much memory."""
    start = 0
    characters = _CHARACTERS
    while start < len(text):
        some = text[start : start + characters]
        spans = tokenizer(some, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        cuts = [begin for begin, _ in spans[tokens::tokens]]
        is_last = start + len(some) == len(text)
        if is_last:
            cuts.append(len(some))
        for first, last in itertools.pairwise([0, *cuts]):
            yield some[first:last]
        read = cuts[-1] if cuts else 0
        start = start + read
        characters = _CHARACTERS if read else 2 * characters
