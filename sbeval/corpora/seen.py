"""Which documents of a corpus was a model trained on? By hashes of some of its training text's tokens, kept beside it.

A span is `SPAN_TOKENS` tokens. Of the spans of a text one in `SAMPLED_ONE_IN` is chosen by its hash, so the same ones
in every text that holds them; of a very long text, the `MOST_SPANS` with the smallest hashes. However text is cut into
documents, a document that was trained on has nearly all of its chosen spans among those of the training text.

Legend: T tokens, S spans chosen.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora.tokens import TokenizedCorpus

SPAN_TOKENS = 32
SAMPLED_ONE_IN = 16
MOST_SPANS = 1 << 21
LEAST_SPANS = 3
"""Of a document with fewer spans chosen nothing is said."""
FILES = "training_text-*.u64"
_LEAST_SHARE = 0.5
_AT_ONCE_TOKENS = 1 << 24
_ODD = np.uint64(0x9E3779B97F4A7C15)
_BASE = 0xD6E8FEB86659FD93
_SHIFT = np.uint64(32)
_LIMIT = np.uint64(2**64 // SAMPLED_ONE_IN)


def span_hashes(tokens_T: NDArray[Any]) -> NDArray[np.uint64]:
    """Returns the hashes of the spans chosen, [S] uint64, in the order of the text."""
    hashes = (tokens_T.astype(np.uint64) + np.uint64(1)) * _ODD
    hashes ^= hashes >> _SHIFT
    length = 1
    while length < SPAN_TOKENS:  # a span's hash from those of its halves
        hashes = hashes[:-length] * np.uint64(pow(_BASE, length, 2**64)) + hashes[length:]
        length *= 2
    hashes ^= hashes >> _SHIFT
    hashes *= _ODD
    hashes ^= hashes >> _SHIFT
    return hashes[hashes < _LIMIT]


def keep_seen(
    stretches: Iterable[NDArray[Any]], tokenizer_sha256: str, folder: Path, *, parent: Path | None = None
) -> None:
    """Writes the spans of what a model was trained on beside it, with those that its parent was trained on.

    `stretches` are [T] tokens each, in any order.
    """
    gathered = [np.empty(0, np.uint64) if parent is None else _read(_file(parent, tokenizer_sha256))]
    count = 0
    for stretch in stretches:
        for hashes in _in_pieces(stretch):
            gathered.append(hashes)
            if (count := count + len(hashes)) >= MOST_SPANS:
                gathered = [_smallest(gathered)]
                count = 0
    _smallest(gathered).astype("<u8").tofile(_file(folder, tokenizer_sha256))


def seen_documents(folder: Path, corpus: TokenizedCorpus, documents: Iterable[int]) -> list[str] | None:
    """Returns the names of documents most of whose text a model was trained on.

    None where its training left no record of that, or one with other tokens than the corpus has.
    """
    file = _file(folder, corpus.tokenizer_sha256)
    if not file.is_file():
        return None
    seen = np.append(_read(file), _LIMIT)  # which no hash chosen reaches
    limit = seen[-2] if len(seen) > MOST_SPANS else _LIMIT
    names = []
    for document in documents:
        pieces = _in_pieces(corpus.tokens(int(corpus.starts[document]), int(corpus.stops[document])))
        hashes = np.unique(np.concatenate([piece[piece <= limit] for piece in pieces]))
        if len(hashes) >= LEAST_SPANS and (seen[np.searchsorted(seen, hashes)] == hashes).mean() >= _LEAST_SHARE:
            names.append(corpus.names[document])
    return names


def _in_pieces(tokens_T: NDArray[Any]) -> Iterator[NDArray[np.uint64]]:
    """Yields the hashes of the spans chosen, of as much text at once as fits into memory, at least once."""
    for start in range(0, max(1, len(tokens_T)), _AT_ONCE_TOKENS):
        yield span_hashes(tokens_T[start : start + _AT_ONCE_TOKENS + SPAN_TOKENS - 1])


def _smallest(gathered: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    return np.unique(np.concatenate(gathered))[:MOST_SPANS]


def _file(folder: Path, tokenizer_sha256: str) -> Path:
    return folder / FILES.replace("*", tokenizer_sha256[:16])


def _read(file: Path) -> NDArray[np.uint64]:
    """Reads spans, none where there is no file; any bytes are some, and others than were written match nothing."""
    return np.fromfile(file, "<u8", MOST_SPANS) if file.is_file() else np.empty(0, np.uint64)
