"""Documents to tokens, with the words and bytes that fall to each token.

Legend: n tokens of one document, separators included.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora.documents import Document
from sbeval.corpora.long_documents import PIECE_CHARACTERS, DocumentTokens, long_document_tokens
from sbeval.corpora.tokens import Layout

# by code point; the last entry stands for all above U+3000, the last white space
_SPACE_TABLE = np.array([chr(point).isspace() for point in range(0x3002)])
UNKNOWN = -1


class EncodedDocument(NamedTuple):
    """One row of the token file.

    Attributes:
        document: what was encoded.
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


def encode_documents(documents: list[Document], tokenizer: Any, layout: Layout) -> list[EncodedDocument]:
    """Encodes a batch; a fast tokenizer uses all cores, and reads a very long document in pieces.

    Raises:
        UserError: pieces of a very long document have no tokens in common where they overlap.
    """
    whole = [document for document in documents if not (tokenizer.is_fast and len(document.text) > PIECE_CHARACTERS)]
    options = {"return_attention_mask": False, "verbose": False, "return_offsets_mapping": bool(tokenizer.is_fast)}
    texts = [document.text for document in whole]
    encoded = tokenizer(texts, add_special_tokens=layout.special_tokens, **options) if texts else {"input_ids": []}
    offsets = encoded["offset_mapping"] if tokenizer.is_fast and texts else [None] * len(texts)
    together = iter(zip(encoded["input_ids"], offsets, strict=True))
    rows = []
    for document in documents:
        special = layout.special_tokens and not _starts_with_prefix(document.text, tokenizer)
        if tokenizer.is_fast and len(document.text) > PIECE_CHARACTERS:
            parts = long_document_tokens(document, tokenizer, special_tokens=special)
        else:
            ids, spans = next(together)
            if special != layout.special_tokens:
                again = tokenizer(document.text, add_special_tokens=False, **options)
                ids, spans = again["input_ids"], again["offset_mapping"] if tokenizer.is_fast else None
            parts = iter([DocumentTokens.of(ids, spans)])
        rows.append(_row(document, parts, layout.separator))
    return rows


def _starts_with_prefix(text: str, tokenizer: Any) -> bool:
    """Whether the text itself begins with BOS (else EOS), in which case lm-eval adds no special tokens."""
    token = tokenizer.bos_token if tokenizer.bos_token is not None else tokenizer.eos_token
    return bool(token) and text.startswith(token)


def _row(document: Document, parts: Iterator[DocumentTokens], separator: tuple[int, ...]) -> EncodedDocument:
    ids, words, sizes = [], [], []
    known, before = True, 0
    pending = next(parts, None)
    while pending is not None:
        part, pending = pending, next(parts, None)
        ids.append(part.ids)
        known = known and part.ends is not None
        if part.ends is None or not len(part.ids):
            continue
        ends = np.maximum(np.maximum.accumulate(part.ends), before)
        if pending is None:
            ends[int(np.argmax(ends)) :] = len(document.text)
        # from the last token's character on, so that a word that goes on is not counted again
        begin = max(before - 1, 0)
        words_before, bytes_before = words_and_bytes_before(document.text[begin : int(ends[-1])], ends - begin)
        own_words, own_bytes = words_and_bytes_before(document.text[begin:before], np.array([before - begin]))
        words.append(np.diff(words_before, prepend=own_words).astype(np.int32))
        sizes.append(np.diff(bytes_before, prepend=own_bytes).astype(np.int32))
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
        spaces, sizes_before = _SPACE_TABLE[np.frombuffer(text.encode("ascii"), np.uint8)], ends
    else:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        spaces = _SPACE_TABLE[np.minimum(points, len(_SPACE_TABLE) - 1)]
        sizes = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
        sizes_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])[ends]
    begins = spaces & ~np.concatenate([np.zeros(1, bool), spaces[:-1]])
    return np.searchsorted(np.flatnonzero(begins), ends, side="left").astype(np.int64), sizes_before
