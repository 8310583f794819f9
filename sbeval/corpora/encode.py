"""Documents to tokens, with the words and bytes that fall to each token.

A tokenizer takes some hundred bytes of memory for each character while it works, so a very long document is encoded in
pieces that overlap. A piece's tokens are wrong only near its ends, where the text beside them is missing: two pieces
are joined in the middle of their overlap, at tokens that both have.

Legend: n tokens of a piece or of one document, separators included.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora.documents import Document
from sbeval.corpora.tokens import Layout
from sbeval.errors import UserError

PIECE_CHARACTERS = 2**19
_OVERLAP_CHARACTERS = 2**13
_SAME_TOKENS = 16
_QUIET: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
# by code point; the last entry stands for all above U+3000, the last white space
_SPACE_TABLE = np.array([chr(point).isspace() for point in range(0x3002)])
UNKNOWN = -1


class EncodedDocument(NamedTuple):
    """One row of the token file.

    Attributes:
        tokens: int32 [n].
        token_words: int32 [n], words that begin in each token.
        token_bytes: int32 [n], bytes of the characters that begin in each token.
        text_words: sum of `token_words`, or `UNKNOWN` where the tokenizer tells no character offsets.
        text_bytes: sum of `token_bytes`, or `UNKNOWN`.
    """

    document: Document
    tokens: NDArray[np.int32]
    token_words: NDArray[np.int32]
    token_bytes: NDArray[np.int32]
    text_words: int
    text_bytes: int


class DocumentTokens(NamedTuple):
    """Tokens in the order of the text, int32 [n], and the character behind each, int64 [n], None if unknown."""

    ids: NDArray[np.int32]
    ends: NDArray[np.int64] | None

    @classmethod
    def of(cls, ids: list[int], spans: list[tuple[int, int]] | None, shift: int = 0) -> Self:
        """Returns what a tokenizer has told of a text that begins `shift` characters into its document."""
        ends = None if spans is None else shift + np.fromiter((end for _, end in spans), np.int64, len(spans))
        return cls(np.asarray(ids, np.int32), ends)


def encode_documents(documents: list[Document], tokenizer: Any, layout: Layout) -> list[EncodedDocument]:
    """Encodes a batch; a fast tokenizer uses all cores, and reads a very long document in pieces.

    Raises:
        UserError: pieces of a very long document have no tokens in common where they overlap.
    """
    whole = [document for document in documents if not (tokenizer.is_fast and len(document.text) > PIECE_CHARACTERS)]
    options = {**_QUIET, "return_offsets_mapping": bool(tokenizer.is_fast)}
    texts = [document.text for document in whole]
    encoded = tokenizer(texts, add_special_tokens=layout.special_tokens, **options) if texts else {"input_ids": []}
    offsets = encoded["offset_mapping"] if tokenizer.is_fast and texts else [None] * len(texts)
    together = iter(zip(encoded["input_ids"], offsets, strict=True))
    rows = []
    for document in documents:
        special = layout.special_tokens and not _starts_with_prefix(document.text, tokenizer)
        if tokenizer.is_fast and len(document.text) > PIECE_CHARACTERS:
            pieces = long_document_tokens(document, tokenizer, special_tokens=special)
        else:
            ids, spans = next(together)
            if special != layout.special_tokens:
                again = tokenizer(document.text, add_special_tokens=False, **options)
                ids = again["input_ids"]
                spans = again["offset_mapping"] if tokenizer.is_fast else None
            pieces = iter([DocumentTokens.of(ids, spans)])
        rows.append(_row(document, pieces, layout.separator))
    return rows


def _starts_with_prefix(text: str, tokenizer: Any) -> bool:
    """Whether the text itself begins with BOS (else EOS), in which case lm-eval adds no special tokens."""
    token = tokenizer.bos_token if tokenizer.bos_token is not None else tokenizer.eos_token
    return bool(token) and text.startswith(token)


def _row(document: Document, pieces: Iterator[DocumentTokens], separator: tuple[int, ...]) -> EncodedDocument:
    ids = []
    words = []
    sizes = []
    known = True
    before = 0
    pending = next(pieces, None)
    while pending is not None:
        piece = pending
        pending = next(pieces, None)
        ids.append(piece.ids)
        known = known and piece.ends is not None
        if piece.ends is None or not len(piece.ids):
            continue
        ends = np.maximum(np.maximum.accumulate(piece.ends), before)
        if pending is None:
            ends[int(np.argmax(ends)) :] = len(document.text)
        # from the last token's character on, so that a word that goes on is not counted again
        begin = max(before - 1, 0)
        words_before, bytes_before = words_and_bytes_before(document.text[begin : int(ends[-1])], ends - begin)
        earlier_words, earlier_bytes = words_and_bytes_before(document.text[begin:before], np.array([before - begin]))
        words.append(np.diff(words_before, prepend=earlier_words).astype(np.int32))
        sizes.append(np.diff(bytes_before, prepend=earlier_bytes).astype(np.int32))
        before = int(ends[-1])
    tokens = np.concatenate([*ids, np.asarray(separator, np.int32)])
    token_words, token_bytes = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), np.int32)
    if not known or not words:
        return EncodedDocument(document, tokens, token_words, token_bytes, UNKNOWN, UNKNOWN)
    token_words[: sum(map(len, words))] = np.concatenate(words)
    token_words[0] += 1
    token_bytes[: sum(map(len, sizes))] = np.concatenate(sizes)
    return EncodedDocument(document, tokens, token_words, token_bytes, int(token_words.sum()), int(token_bytes.sum()))


def words_and_bytes_before(text: str, ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns runs of white space that begin before each end, and UTF-8 bytes before it, int64 [n] each."""
    if text.isascii():
        spaces = _SPACE_TABLE[np.frombuffer(text.encode("ascii"), np.uint8)]
        sizes_before = ends
    else:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        spaces = _SPACE_TABLE[np.minimum(points, len(_SPACE_TABLE) - 1)]
        sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
        sizes_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])[ends]
    begins = spaces & ~np.concatenate([np.zeros(1, bool), spaces[:-1]])
    return np.searchsorted(np.flatnonzero(begins), ends, side="left").astype(np.int64), sizes_before


def long_document_tokens(document: Document, tokenizer: Any, *, special_tokens: bool) -> Iterator[DocumentTokens]:
    """Yields the tokens of a document of more than `PIECE_CHARACTERS` piece by piece; the tokenizer is a fast one.

    Raises:
        UserError: two pieces have no tokens in common where they overlap.
    """
    starts = range(0, len(document.text) - _OVERLAP_CHARACTERS, PIECE_CHARACTERS - _OVERLAP_CHARACTERS)
    before: DocumentTokens | None = None
    first = 0
    for start in starts:
        text = document.text[start : start + PIECE_CHARACTERS]
        encoded = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=True, **_QUIET)
        piece = DocumentTokens.of(encoded["input_ids"], encoded["offset_mapping"], start)
        if before is not None:
            if (joint := _joint(before, piece, start + _OVERLAP_CHARACTERS // 2)) is None:
                raise UserError(
                    f"Expected a document that can be encoded in pieces of {PIECE_CHARACTERS:,} characters, found "
                    f"{document.name!r} of {len(document.text):,}, whose tokens around character {start:,} depend on "
                    "what lies far from them: cut the text into documents, such as lines of a .jsonl file."
                )
            yield _between(before, first, joint[0])
            first = joint[1]
        before = piece
    if before is not None:
        yield _between(before, first, len(before.ids))


def _between(piece: DocumentTokens, first: int, last: int) -> DocumentTokens:
    assert piece.ends is not None
    return DocumentTokens(piece.ids[first:last], piece.ends[first:last])


def _joint(before: DocumentTokens, after: DocumentTokens, middle: int) -> tuple[int, int] | None:
    """Returns where `_SAME_TOKENS` tokens of both are the same, as close behind `middle` as there are any."""
    assert before.ends is not None
    assert after.ends is not None
    # a token behind the text tells no character
    ends, others = np.maximum.accumulate(before.ends), np.maximum.accumulate(after.ends)
    left, right = int(np.searchsorted(ends, middle)), int(np.searchsorted(others, middle))
    while max(left + _SAME_TOKENS - len(ends), right + _SAME_TOKENS - len(others)) <= 0:
        here, there = slice(left, left + _SAME_TOKENS), slice(right, right + _SAME_TOKENS)
        if np.array_equal(before.ids[here], after.ids[there]) and np.array_equal(ends[here], others[there]):
            return left, right
        step = int(ends[left]) - int(others[right])
        left = left + (step <= 0)
        right = right + (step >= 0)
    return None
