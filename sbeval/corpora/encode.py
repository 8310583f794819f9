"""Documents to tokens, with the words and bytes that fall to each token.

Legend: n tokens of one document, separators included.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora.documents import Document
from sbeval.corpora.tokens import Layout

# by code point; the last entry stands for all above white space's last, U+3000
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
    """Encodes a batch; a fast tokenizer uses all cores."""
    texts = [document.text for document in documents]
    options = {"return_attention_mask": False, "verbose": False, "return_offsets_mapping": bool(tokenizer.is_fast)}
    encoded = tokenizer(texts, add_special_tokens=layout.special_tokens, **options)
    offsets = encoded["offset_mapping"] if tokenizer.is_fast else [None] * len(texts)
    rows = []
    for document, ids, spans in zip(documents, encoded["input_ids"], offsets, strict=True):
        if layout.special_tokens and _starts_with_prefix(document.text, tokenizer):
            again = tokenizer(document.text, add_special_tokens=False, **options)
            ids, spans = again["input_ids"], again["offset_mapping"] if tokenizer.is_fast else None
        rows.append(_row(document, ids, spans, layout.separator))
    return rows


def _starts_with_prefix(text: str, tokenizer: Any) -> bool:
    """Whether the text itself begins with BOS (else EOS), in which case lm-eval adds no special tokens."""
    token = tokenizer.bos_token if tokenizer.bos_token is not None else tokenizer.eos_token
    return bool(token) and text.startswith(token)


def _row(
    document: Document, ids: list[int], spans: list[tuple[int, int]] | None, separator: tuple[int, ...]
) -> EncodedDocument:
    tokens = np.asarray([*ids, *separator], np.int32)
    words, sizes = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), np.int32)
    if spans is None or not ids:
        return EncodedDocument(document, tokens, words, sizes, UNKNOWN, UNKNOWN)
    ends = np.maximum.accumulate(np.fromiter((end for _, end in spans), np.int64, len(spans)))
    ends[int(np.argmax(ends)) :] = len(document.text)
    words_before, bytes_before = words_and_bytes_before(document.text, ends)
    words[: len(ids)] = np.diff(words_before, prepend=0)
    words[0] += 1
    sizes[: len(ids)] = np.diff(bytes_before, prepend=0)
    return EncodedDocument(document, tokens, words, sizes, int(words.sum()), int(sizes.sum()))


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
