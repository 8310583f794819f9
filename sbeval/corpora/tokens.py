"""The tokens of a corpus as one flat array, memory-mapped from an Arrow file of `datasets`.

Legend: N tokens of the whole corpus, C documents.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Layout(NamedTuple):
    """How documents are laid out in the flat array.

    Attributes:
        separator: token ids after each document.
        special_tokens: whether each document is encoded with special tokens, as lm-eval does.
    """

    separator: tuple[int, ...] = ()
    special_tokens: bool = False

    @property
    def label(self) -> str:
        """Text that identifies the layout in token keys and file names."""
        return f"{'hf' if self.special_tokens else 'plain'}-{'.'.join(map(str, self.separator))}"


class TargetSums(NamedTuple):
    """Sums of NLL, tokens, words and bytes over the targets of a range that lie in one document.

    `words` and `bytes` are the parts of the counts of the original page (the document before preprocessing) that belong
    to these targets. They are NaN if the tokenizer returns no character offsets.
    """

    document: int
    nll_nats: float
    tokens: int
    words: float
    bytes: float


def _slice(array: Any, start: int, stop: int) -> NDArray[np.int32]:
    """Returns a range of a chunked memory-mapped array: a view if it lies in one chunk, else a copy."""
    if not 0 <= start <= stop <= len(array):
        raise ValueError(f"expected a range within {len(array)} tokens, found {start} to {stop}")
    chunks: list[NDArray[np.int32]] = [chunk.to_numpy() for chunk in array.slice(start, stop - start).chunks]
    return chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, np.int32), *chunks])


class _Counts(NamedTuple):
    """Counts of words, or of bytes, in a corpus.

    Attributes:
        of_tokens: number of words or bytes that begin in each token, [N].
        of_text: sum of these numbers over the tokens of each document, [C]; negative if the tokenizer returns no
            character offsets.
        of_page: number of words or bytes in the original page of each document, before preprocessing, [C].
    """

    of_tokens: Any
    of_text: NDArray[np.int64]
    of_page: NDArray[np.int64]

    def share(self, document: int, start: int, stop: int) -> float:
        """Returns how many of the original page's words or bytes belong to a token range; NaN without offsets."""
        if self.of_text[document] < 0:
            return float("nan")
        counted = int(_slice(self.of_tokens, start, stop).sum(dtype=np.int64))
        return counted * float(self.of_page[document]) / max(int(self.of_text[document]), 1)


@dataclass(frozen=True, kw_only=True)
class TokenizedCorpus:
    """A tokenised corpus.

    Attributes:
        corpus_sha256: hash of the documents.
        tokenizer_sha256: hash of the tokenizer.
        layout: separator and special tokens.
        path: the Arrow file, one row for each document.
        names: document names, [C].
        starts: index of the first token of each document, and N at the end, [C + 1].
    """

    corpus_sha256: str
    tokenizer_sha256: str
    layout: Layout
    path: Path
    names: list[str]
    starts: NDArray[np.int64]
    _words: _Counts
    _bytes: _Counts
    _tokens: Any

    @property
    def total_tokens(self) -> int:
        """Number of tokens, separators included."""
        return int(self.starts[-1])

    @cached_property
    def stops(self) -> NDArray[np.int64]:
        """Index after the last token of each document, which is not a separator, [C]."""
        return self.starts[1:] - len(self.layout.separator)

    @cached_property
    def document_tokens(self) -> NDArray[np.int64]:
        """Number of tokens in each document, without separators, [C]."""
        return self.stops - self.starts[:-1]

    @property
    def original_words(self) -> NDArray[np.int64]:
        """Number of words in the original page (before preprocessing) of each document, [C]."""
        return self._words.of_page

    @property
    def original_bytes(self) -> NDArray[np.int64]:
        """Number of UTF-8 bytes in the original page (before preprocessing) of each document, [C]."""
        return self._bytes.of_page

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """Returns the tokens of a range, int32. The array may be a read-only view of the file."""
        return _slice(self._tokens, start, stop)

    def document_at(self, position: int) -> int:
        """Returns the index of the document that holds a token; a separator belongs to the document before it."""
        return int(np.searchsorted(self.starts, position, side="right")) - 1

    def bytes_before(self, document: int, position: int) -> int | None:
        """Returns the number of bytes of a document's text before a token; None without character offsets.

        It is the number of UTF-8 bytes of the characters that begin in an earlier token of the document.
        """
        if self._bytes.of_text[document] < 0:
            return None
        return int(_slice(self._bytes.of_tokens, int(self.starts[document]), position).sum(dtype=np.int64))

    def document_sums(self, start: int, nll_nats: NDArray[np.float64]) -> list[TargetSums]:
        """Sums NLL, tokens, words and bytes of a range of targets, for each document in the range.

        A word, or the bytes of a character, belong to the token in which the word or the character begins. Both counts
        are scaled so that the sum over a document is the count of its original page (before preprocessing). They are
        NaN if the tokenizer returns no character offsets.

        Args:
            start: position of the first target.
            nll_nats: NLL of each target in nats, float64.
        """
        stop = start + len(nll_nats)
        sums = []
        document = self.document_at(start)
        while start < stop:
            end = min(stop, int(self.starts[document + 1]))
            document_nll, nll_nats = nll_nats[: end - start], nll_nats[end - start :]
            if end > start:
                words, size = (counts.share(document, start, end) for counts in (self._words, self._bytes))
                sums.append(TargetSums(document, float(document_nll.sum()), end - start, words, size))
            start, document = end, document + 1
        return sums


def open_tokenized(path: Path, *, corpus_sha256: str, tokenizer_sha256: str, layout: Layout) -> TokenizedCorpus:
    """Memory-maps a token file that `sbeval.corpora.store` wrote."""
    import datasets  # takes seconds to import
    import pyarrow as pa  # takes a third of a second to import

    table: Any = datasets.Dataset.from_file(str(path)).data.table
    lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in table["tokens"].chunks]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths]))])

    def flat_column(column: str) -> Any:
        return pa.chunked_array([chunk.flatten() for chunk in table[column].chunks], pa.int32())

    def counts(unit: str) -> _Counts:
        return _Counts(
            flat_column(f"token_{unit}"), table[f"text_{unit}"].to_numpy(), table[f"original_{unit}"].to_numpy()
        )

    return TokenizedCorpus(
        corpus_sha256=corpus_sha256,
        tokenizer_sha256=tokenizer_sha256,
        layout=layout,
        path=path,
        names=table["name"].to_pylist(),
        starts=starts.astype(np.int64),
        _words=counts("words"),
        _bytes=counts("bytes"),
        _tokens=flat_column("tokens"),
    )
