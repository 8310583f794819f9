"""One flat token array for a corpus, a tokenizer and a layout, memory-mapped from a `datasets` Arrow file.

Legend: N tokens of the whole corpus, C documents.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Layout(NamedTuple):
    """How documents lie in the flat array: token ids after each, and whether each has lm-eval's special tokens."""

    separator: tuple[int, ...] = ()
    special_tokens: bool = False

    @property
    def label(self) -> str:
        """Names the layout in keys and file names."""
        return f"{'hf' if self.special_tokens else 'plain'}-{'.'.join(map(str, self.separator))}"


class TargetSums(NamedTuple):
    """What a range of targets adds to one document; `words` and `bytes` are shares of the original page."""

    document: int
    nll_nats: float
    tokens: int
    words: float
    bytes: float


def _slice(array: Any, start: int, stop: int) -> NDArray[np.int32]:
    """Returns a range of a long array held as consecutive memory-mapped pieces; within a piece it is a view."""
    if not 0 <= start <= stop <= len(array):
        raise ValueError(f"expected a range within {len(array)} tokens, found {start} to {stop}")
    pieces: list[NDArray[np.int32]] = [piece.to_numpy() for piece in array.slice(start, stop - start).chunks]
    return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.int32), *pieces])


class _Counts(NamedTuple):
    """Words or bytes of a corpus.

    Attributes:
        of_tokens: [N] that begin in each token.
        of_text: [C] sum over each document's tokens; below zero where the tokenizer tells no character offsets.
        of_page: [C] of the original page.
    """

    of_tokens: Any
    of_text: NDArray[np.int64]
    of_page: NDArray[np.int64]

    def share(self, document: int, start: int, stop: int) -> float:
        """Returns the share of the original page that a range of tokens has; NaN where that is unknown."""
        if self.of_text[document] < 0:
            return float("nan")
        counted = int(_slice(self.of_tokens, start, stop).sum(dtype=np.int64))
        return counted * float(self.of_page[document]) / max(int(self.of_text[document]), 1)


@dataclass(frozen=True, kw_only=True)
class TokenizedCorpus:
    """A corpus as tokens, and where its documents lie.

    Attributes:
        path: the Arrow file, one row a document.
        names: [C] document names.
        starts: [C + 1] first token of each document, and N.
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
        """N, separators included."""
        return int(self.starts[-1])

    @cached_property
    def stops(self) -> NDArray[np.int64]:
        """[C] end of each document's own tokens, separators left out."""
        return self.starts[1:] - len(self.layout.separator)

    @cached_property
    def document_tokens(self) -> NDArray[np.int64]:
        """[C] tokens of each document, separators left out."""
        return self.stops - self.starts[:-1]

    @property
    def original_words(self) -> NDArray[np.int64]:
        """[C] words of the original page."""
        return self._words.of_page

    @property
    def original_bytes(self) -> NDArray[np.int64]:
        """[C] bytes of the original page."""
        return self._bytes.of_page

    def tokens(self, start: int, stop: int) -> NDArray[np.int32]:
        """Returns the tokens of a range; read-only where it lies in one piece of the file."""
        return _slice(self._tokens, start, stop)

    def document_at(self, position: int) -> int:
        """Returns the document a token belongs to; a separator belongs to the document before it."""
        return int(np.searchsorted(self.starts, position, side="right")) - 1

    def bytes_before(self, document: int, position: int) -> int | None:
        """Returns the bytes of a document's text before a token; None where the tokenizer tells no character offsets.

        Those are the bytes of the characters that begin in an earlier token of the document.
        """
        if self._bytes.of_text[document] < 0:
            return None
        return int(_slice(self._bytes.of_tokens, int(self.starts[document]), position).sum(dtype=np.int64))

    def document_sums(self, start: int, nll_nats: NDArray[np.float64]) -> list[TargetSums]:
        """Splits the targets from `start` on by document and sums each part.

        A token's words are the words that begin in it, its bytes those of the characters that begin in it, both scaled
        so that a document's tokens add up to the words and bytes of its original page. NaN where the tokenizer tells no
        character offsets. NLL is float64, one value a target.
        """
        stop = start + len(nll_nats)
        sums = []
        document = self.document_at(start)
        while start < stop:
            end = min(stop, int(self.starts[document + 1]))
            within = nll_nats[: end - start]
            nll_nats = nll_nats[end - start :]
            if end > start:
                words, size = (counts.share(document, start, end) for counts in (self._words, self._bytes))
                sums.append(TargetSums(document, float(within.sum()), end - start, words, size))
            start = end
            document = document + 1
        return sums


def open_tokenized(path: Path, *, corpus_sha256: str, tokenizer_sha256: str, layout: Layout) -> TokenizedCorpus:
    """Memory-maps a file that `sbeval.corpora.store` wrote."""
    import datasets  # seconds, which a command that reads no text does without
    import pyarrow as pa  # as above

    table: Any = datasets.Dataset.from_file(str(path)).data.table
    lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in table["tokens"].chunks]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths]))])

    def pieces(column: str) -> Any:
        return pa.chunked_array([chunk.flatten() for chunk in table[column].chunks], pa.int32())

    def counts(unit: str) -> _Counts:
        return _Counts(pieces(f"token_{unit}"), table[f"text_{unit}"].to_numpy(), table[f"original_{unit}"].to_numpy())

    return TokenizedCorpus(
        corpus_sha256=corpus_sha256,
        tokenizer_sha256=tokenizer_sha256,
        layout=layout,
        path=path,
        names=table["name"].to_pylist(),
        starts=starts.astype(np.int64),
        _words=counts("words"),
        _bytes=counts("bytes"),
        _tokens=pieces("tokens"),
    )
