"""Encodes documents, and counts the words and bytes that belong to each token.

A tokenizer needs about a hundred bytes of memory for each character that it encodes. Very long documents are therefore
encoded in overlapping chunks. Only tokens near the ends of a chunk can be wrong, because the text before or after them
is missing. Two chunks are joined near the middle of their overlap, where both have the same tokens.

Legend: n tokens of a chunk or of one document, separators included.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora.documents import Document
from sbeval.corpora.tokens import Layout
from sbeval.errors import UserError

CHUNK_CHARACTERS = 2**19
_OVERLAP_CHARACTERS = 2**13
_SAME_TOKENS = 16
_QUIET: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
# whether each code point is white space; the last entry stands for all code points above U+3000, none of which is
_SPACE_TABLE = np.array([chr(point).isspace() for point in range(0x3002)])
UNKNOWN = -1
"""Stands for an unknown number of words or bytes in the token file: the tokenizer returns no character offsets."""


class EncodedDocument(NamedTuple):
    """An encoded document: one row of the token file.

    Attributes:
        document: the encoded document.
        tokens: token ids, int32 [n].
        token_words: number of words that begin in each token, int32 [n].
        token_bytes: UTF-8 bytes of the characters that begin in each token, int32 [n].
        text_words: sum of `token_words`, or `UNKNOWN` if the tokenizer returns no character offsets.
        text_bytes: sum of `token_bytes`, or `UNKNOWN`.
    """

    document: Document
    tokens: NDArray[np.int32]
    token_words: NDArray[np.int32]
    token_bytes: NDArray[np.int32]
    text_words: int
    text_bytes: int


class DocumentTokens(NamedTuple):
    """Token ids, int32 [n], and the end of each token as a character offset, int64 [n], or None if unknown."""

    ids: NDArray[np.int32]
    ends: NDArray[np.int64] | None

    @classmethod
    def of(cls, ids: list[int], spans: list[tuple[int, int]] | None, shift: int = 0) -> Self:
        """Converts the ids and the offset mapping (`spans`) that a tokenizer returned for a part of a document.

        `shift` is the number of characters of the document before that part.
        """
        ends = None if spans is None else shift + np.fromiter((end for _, end in spans), np.int64, len(spans))
        return cls(np.asarray(ids, np.int32), ends)


def encode_documents(documents: list[Document], tokenizer: Any, layout: Layout) -> list[EncodedDocument]:
    """Encodes a batch of documents. A fast tokenizer uses all cores, and encodes a very long document in chunks.

    Raises:
        UserError: two chunks of a very long document have no tokens in common in their overlap.
    """
    short = [document for document in documents if not (tokenizer.is_fast and len(document.text) > CHUNK_CHARACTERS)]
    options = {**_QUIET, "return_offsets_mapping": bool(tokenizer.is_fast)}
    texts = [document.text for document in short]
    encoded = tokenizer(texts, add_special_tokens=layout.special_tokens, **options) if texts else {"input_ids": []}
    offsets = encoded["offset_mapping"] if tokenizer.is_fast and texts else [None] * len(texts)
    encoded_short = iter(zip(encoded["input_ids"], offsets, strict=True))
    rows = []
    for document in documents:
        special = layout.special_tokens and not _starts_with_prefix(document.text, tokenizer)
        if tokenizer.is_fast and len(document.text) > CHUNK_CHARACTERS:
            chunks = long_document_tokens(document, tokenizer, special_tokens=special)
        else:
            ids, spans = next(encoded_short)
            if special != layout.special_tokens:
                again = tokenizer(document.text, add_special_tokens=False, **options)
                ids, spans = again["input_ids"], again["offset_mapping"] if tokenizer.is_fast else None
            chunks = iter([DocumentTokens.of(ids, spans)])
        rows.append(_row(document, chunks, layout.separator))
    return rows


def _starts_with_prefix(text: str, tokenizer: Any) -> bool:
    """Whether the text already begins with BOS, or with EOS if there is no BOS: lm-eval then adds no special tokens."""
    token = tokenizer.bos_token if tokenizer.bos_token is not None else tokenizer.eos_token
    return bool(token) and text.startswith(token)


def _row(document: Document, chunks: Iterator[DocumentTokens], separator: tuple[int, ...]) -> EncodedDocument:
    """Joins a document's chunks of tokens, appends the separator, and counts the words and bytes of each token."""
    ids, words, sizes = [], [], []
    has_offsets, done_characters = True, 0
    pending = next(chunks, None)
    while pending is not None:
        chunk, pending = pending, next(chunks, None)
        ids.append(chunk.ids)
        has_offsets = has_offsets and chunk.ends is not None
        if chunk.ends is None or not len(chunk.ids):
            continue
        ends = np.maximum(np.maximum.accumulate(chunk.ends), done_characters)
        if pending is None:
            ends[int(np.argmax(ends)) :] = len(document.text)
        # start one character earlier: white space that continues from the previous chunk must not begin a new word
        begin = max(done_characters - 1, 0)
        words_before, bytes_before = words_and_bytes_before(document.text[begin : int(ends[-1])], ends - begin)
        earlier_words, earlier_bytes = words_and_bytes_before(
            document.text[begin:done_characters], np.array([done_characters - begin])
        )
        words.append(np.diff(words_before, prepend=earlier_words).astype(np.int32))
        sizes.append(np.diff(bytes_before, prepend=earlier_bytes).astype(np.int32))
        done_characters = int(ends[-1])
    tokens = np.concatenate([*ids, np.asarray(separator, np.int32)])
    token_words, token_bytes = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), np.int32)
    if not has_offsets or not words:
        return EncodedDocument(document, tokens, token_words, token_bytes, UNKNOWN, UNKNOWN)
    token_words[: sum(map(len, words))] = np.concatenate(words)
    token_words[0] += 1
    token_bytes[: sum(map(len, sizes))] = np.concatenate(sizes)
    return EncodedDocument(document, tokens, token_words, token_bytes, int(token_words.sum()), int(token_bytes.sum()))


def words_and_bytes_before(text: str, ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns two counts for each character offset in `ends`, both int64 [n].

    The first is the number of runs of white space that begin before the offset, the second that of UTF-8 bytes before
    it.
    """
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
    """Encodes a document of more than `CHUNK_CHARACTERS` with a fast tokenizer, and yields its tokens in chunks.

    Raises:
        UserError: two chunks have no tokens in common in their overlap.
    """
    starts = range(0, len(document.text) - _OVERLAP_CHARACTERS, CHUNK_CHARACTERS - _OVERLAP_CHARACTERS)
    before: DocumentTokens | None = None
    first = 0
    for start in starts:
        text = document.text[start : start + CHUNK_CHARACTERS]
        encoded = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=True, **_QUIET)
        chunk = DocumentTokens.of(encoded["input_ids"], encoded["offset_mapping"], start)
        if before is not None:
            if (joint := _joint(before, chunk, start + _OVERLAP_CHARACTERS // 2)) is None:
                raise UserError(
                    f"{document.name!r} has {len(document.text):,} characters and must be encoded in chunks of "
                    f"{CHUNK_CHARACTERS:,}, but its tokens near character {start:,} depend on text far away: split the "
                    "text into documents, such as lines of a .jsonl file."
                )
            yield _between(before, first, joint[0])
            first = joint[1]
        before = chunk
    if before is not None:
        yield _between(before, first, len(before.ids))


def _between(chunk: DocumentTokens, first: int, last: int) -> DocumentTokens:
    """Returns the tokens `first` to `last` (exclusive) of a chunk with known character offsets."""
    assert chunk.ends is not None
    return DocumentTokens(chunk.ids[first:last], chunk.ends[first:last])


def _joint(before: DocumentTokens, after: DocumentTokens, middle: int) -> tuple[int, int] | None:
    """Finds where two overlapping chunks can be joined: the first run of `_SAME_TOKENS` equal tokens after `middle`.

    Returns:
        The index of the first of these tokens in each chunk, None if there is no such run.
    """
    assert before.ends is not None
    assert after.ends is not None
    # special tokens after the text have offset 0
    ends_before, ends_after = np.maximum.accumulate(before.ends), np.maximum.accumulate(after.ends)
    left, right = int(np.searchsorted(ends_before, middle)), int(np.searchsorted(ends_after, middle))
    while max(left + _SAME_TOKENS - len(ends_before), right + _SAME_TOKENS - len(ends_after)) <= 0:
        here, there = slice(left, left + _SAME_TOKENS), slice(right, right + _SAME_TOKENS)
        if np.array_equal(before.ids[here], after.ids[there]) and np.array_equal(ends_before[here], ends_after[there]):
            return left, right
        step = int(ends_before[left]) - int(ends_after[right])
        left, right = left + (step <= 0), right + (step >= 0)
    return None
