"""Finds the documents of a corpus that a model was trained on.

Training stores hashes of spans of `SPAN_TOKENS` consecutive tokens in the checkpoint's folder. The value of a span's
hash decides whether the span is sampled, on average one in `SAMPLED_ONE_IN`, so a span is sampled in all texts or in
none. Of a very long text only the `MOST_SPANS` smallest hashes are stored (16 MB). If a document was trained on, nearly
all hashes of its sampled spans are stored, however the training text was split into documents. A text that was encoded
with another tokenizer, or that has fewer than `LEAST_SPANS` sampled spans (about 100 tokens), is not judged.

Legend: T tokens, S sampled spans.
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
"""For documents with fewer sampled spans it is not decided whether a model was trained on them."""
FILES = "training_text-*.u64"
_LEAST_SHARE = 0.5
_AT_ONCE_TOKENS = 1 << 24
_ODD = np.uint64(0x9E3779B97F4A7C15)
_BASE = 0xD6E8FEB86659FD93
_SHIFT = np.uint64(32)
_LIMIT = np.uint64(2**64 // SAMPLED_ONE_IN)


def span_hashes(tokens_T: NDArray[Any]) -> NDArray[np.uint64]:
    """Returns the hashes of the sampled spans of a text, uint64 [S], in text order."""
    hashes = (tokens_T.astype(np.uint64) + np.uint64(1)) * _ODD
    hashes ^= hashes >> _SHIFT
    length = 1
    while length < SPAN_TOKENS:  # the hash of a span follows from the hashes of its two halves
        hashes = hashes[:-length] * np.uint64(pow(_BASE, length, 2**64)) + hashes[length:]
        length *= 2
    hashes ^= hashes >> _SHIFT
    hashes *= _ODD
    hashes ^= hashes >> _SHIFT
    return hashes[hashes < _LIMIT]


def write_training_spans(
    stretches: Iterable[NDArray[Any]], tokenizer_sha256: str, folder: Path, *, parent: Path | None = None
) -> None:
    """Writes the span hashes of a training text into a checkpoint's folder.

    Args:
        stretches: ranges of the training text, token ids [T] each, in any order.
        tokenizer_sha256: hash of the tokenizer; part of the file's name.
        folder: the checkpoint's folder.
        parent: folder of the checkpoint that the training started from; its hashes are included.
    """
    gathered = [np.empty(0, np.uint64) if parent is None else _read(_file(parent, tokenizer_sha256))]
    count = 0
    for stretch in stretches:
        for hashes in _in_chunks(stretch):
            gathered.append(hashes)
            count += len(hashes)
            if count >= MOST_SPANS:
                gathered, count = [_smallest(gathered)], 0
    _smallest(gathered).astype("<u8").tofile(_file(folder, tokenizer_sha256))


def seen_documents(folder: Path, corpus: TokenizedCorpus, documents: Iterable[int]) -> list[str] | None:
    """Returns the names of the documents of which at least half the sampled spans are in the training text.

    Args:
        folder: the model's checkpoint.
        corpus: the tokenised corpus.
        documents: indices of the documents to check.

    Returns:
        Names of documents; None if the checkpoint has no span hashes for the corpus's tokenizer.
    """
    file = _file(folder, corpus.tokenizer_sha256)
    if not file.is_file():
        return None
    seen = np.append(_read(file), _LIMIT)  # a sentinel above all sampled hashes, for searchsorted
    limit = seen[-2] if len(seen) > MOST_SPANS else _LIMIT
    names = []
    for document in documents:
        chunks = _in_chunks(corpus.tokens(int(corpus.starts[document]), int(corpus.stops[document])))
        hashes = np.unique(np.concatenate([chunk[chunk <= limit] for chunk in chunks]))
        if len(hashes) >= LEAST_SPANS and (seen[np.searchsorted(seen, hashes)] == hashes).mean() >= _LEAST_SHARE:
            names.append(corpus.names[document])
    return names


def _in_chunks(tokens_T: NDArray[Any]) -> Iterator[NDArray[np.uint64]]:
    """Yields the hashes of the sampled spans in chunks that fit into memory; one empty chunk for an empty text."""
    for start in range(0, max(1, len(tokens_T)), _AT_ONCE_TOKENS):
        yield span_hashes(tokens_T[start : start + _AT_ONCE_TOKENS + SPAN_TOKENS - 1])


def _smallest(gathered: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    return np.unique(np.concatenate(gathered))[:MOST_SPANS]


def _file(folder: Path, tokenizer_sha256: str) -> Path:
    return folder / FILES.replace("*", tokenizer_sha256[:16])


def _read(file: Path) -> NDArray[np.uint64]:
    """Reads span hashes; an empty array if the file is missing. The hashes of a damaged file match no text."""
    return np.fromfile(file, "<u8", MOST_SPANS) if file.is_file() else np.empty(0, np.uint64)
