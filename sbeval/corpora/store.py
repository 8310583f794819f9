"""Tokenises a corpus once into the cache folder, and names token ranges so that any process can load them."""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from sbeval.corpora.documents import Corpus, Document, corpus_sha256
from sbeval.corpora.encode import EncodedDocument, encode_documents
from sbeval.corpora.tokenizers import adds_special_tokens, all_cores, tokenizer_sha256
from sbeval.corpora.tokens import Layout, TokenizedCorpus, open_tokenized
from sbeval.errors import UserError
from sbeval.keeping.cache import cache_folder
from sbeval.keeping.writing import whole_file, writing_to

BATCH_CHARACTERS = 1_000_000
_HASH_CHARACTERS = 20
_FORMAT = "tokens1"
_open: dict[str, TokenizedCorpus] = {}


def tokenize_corpus(corpus: Corpus, tokenizer: Any, layout: Layout) -> TokenizedCorpus:
    """Tokenises a corpus, or opens its tokens from the cache if the cache has them for this tokenizer and layout.

    With a fast tokenizer, words and bytes can also be counted for a part of a document. If a tokenizer adds no special
    tokens, layouts with and without special tokens share one file.
    """
    if layout.special_tokens and not adds_special_tokens(tokenizer):
        layout = layout._replace(special_tokens=False)
    corpus_hash = corpus_sha256(corpus)
    tokenizer_hash = tokenizer_sha256(tokenizer)
    if (name := _name(corpus_hash, tokenizer_hash, layout)) not in _open:
        path = _path(name)
        if not path.exists():
            _write(path, corpus, tokenizer, layout)
        _open[name] = open_tokenized(path, corpus_sha256=corpus_hash, tokenizer_sha256=tokenizer_hash, layout=layout)
    return _open[name]


def token_key(corpus: TokenizedCorpus, start: int, stop: int) -> str:
    """Returns the name of a token range, for requests. `resolve_tokens` loads it in any process with the same cache."""
    return f"{_name(corpus.corpus_sha256, corpus.tokenizer_sha256, corpus.layout)}:{start}:{stop}"


def tokenizer_behind(key: str) -> str:
    """Returns the beginning of the tokenizer's hash from a token key."""
    return key.removeprefix(f"{_FORMAT}-").split("-")[1]


def resolve_tokens(key: str) -> NDArray[np.int32]:
    """Loads the tokens that a token key names, int32. The array may be a read-only view of the cached file.

    Raises:
        ValueError: `key` is not a token key.
        UserError: the cache folder has no such corpus.
    """
    name, _, span = key.partition(":")
    start, _, stop = span.partition(":")
    if not (start.isdecimal() and stop.isdecimal() and int(start) <= int(stop)):
        raise ValueError(f"expected a key made by token_key, found {key!r}")
    if name not in _open:
        path = _path(name)
        if not path.exists():
            raise UserError(
                f"The cache folder {str(path.parent)!r} has no tokens for {key!r}: "
                "set SBEVAL_CACHE to the same folder for every process, or run the task again."
            )
        _open[name] = open_tokenized(path, corpus_sha256="", tokenizer_sha256="", layout=Layout())
    return _open[name].tokens(int(start), int(stop))


def _name(corpus_hash: str, tokenizer_hash: str, layout: Layout) -> str:
    label = layout.label if len(layout.label) <= 40 else sha256(layout.label.encode()).hexdigest()[:_HASH_CHARACTERS]
    return f"{_FORMAT}-{corpus_hash[:_HASH_CHARACTERS]}-{tokenizer_hash[:_HASH_CHARACTERS]}-{label}"


def _path(name: str) -> Path:
    return cache_folder("tokens") / f"{name}.arrow"


def _write(path: Path, corpus: Corpus, tokenizer: Any, layout: Layout) -> None:
    from datasets.arrow_writer import ArrowWriter  # takes seconds to import

    with writing_to(path.parent, "tokens"), FileLock(f"{path}.lock"):
        if path.exists():
            return
        with whole_file(path, "tokens") as unfinished, all_cores(), ArrowWriter(path=str(unfinished)) as writer:
            for documents in batches(corpus.documents()):
                writer.write_table(_table(encode_documents(documents, tokenizer, layout)))
            writer.finalize()


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Yields batches of documents with about `BATCH_CHARACTERS` characters each."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def _table(rows: list[EncodedDocument]) -> Any:
    import pyarrow as pa  # takes a third of a second to import

    offsets = np.cumsum([0] + [len(row.tokens) for row in rows]).astype(np.int32)

    def lists(arrays: list[NDArray[np.int32]]) -> Any:
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)))

    return pa.table(
        {
            "name": [row.document.name for row in rows],
            "original_words": pa.array([row.document.original_words for row in rows], pa.int64()),
            "original_bytes": pa.array([row.document.original_bytes for row in rows], pa.int64()),
            "text_words": pa.array([row.text_words for row in rows], pa.int64()),
            "text_bytes": pa.array([row.text_bytes for row in rows], pa.int64()),
            "tokens": lists([row.tokens for row in rows]),
            "token_words": lists([row.token_words for row in rows]),
            "token_bytes": lists([row.token_bytes for row in rows]),
        }
    )
