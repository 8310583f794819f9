"""Keeps held-out text out of the training text: shared spans of tokens, found by a rolling hash."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from sbeval.training.tokenizer import Tokens

SPAN_TOKENS = 50

_BASE = 0x9E3779B97F4A7C15
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_FILTER_BITS_MAX = 27
_FILTER_SLOTS_A_HASH = 32


def span_hashes(tokens: Tokens, span_tokens: int = SPAN_TOKENS) -> NDArray[np.uint64]:
    """Hashes every span of consecutive tokens.

    A polynomial hash modulo 2**64: prefix sums of token * base**position, each span's difference divided by
    base**start (the base is odd, so it has an inverse), so one pass serves all spans.

    Returns:
        [len(tokens) - span_tokens + 1] hashes, empty where the text is shorter than a span.
    """
    count = len(tokens) - span_tokens + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(len(tokens), _BASE, np.uint64))
        inverses = np.cumprod(np.full(count, _BASE_INVERSE, np.uint64))
        prefix = np.concatenate([np.zeros(1, np.uint64), np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers)])
        hashes = (prefix[span_tokens:] - prefix[:-span_tokens]) * inverses
        # low bits of a polynomial hash are weak: mix the high ones in
        hashes ^= hashes >> np.uint64(31)
        hashes *= _MIX
        hashes ^= hashes >> np.uint64(29)
    result: NDArray[np.uint64] = hashes
    return result


class SpanIndex:
    """The set of all spans of some documents."""

    def __init__(self, documents: Iterable[Tokens], span_tokens: int = SPAN_TOKENS) -> None:
        self.span_tokens = span_tokens
        hashes = [span_hashes(tokens, span_tokens) for tokens in documents]
        self._hashes = np.unique(np.concatenate(hashes)) if hashes else np.empty(0, np.uint64)
        # most spans are in no index: a table of leading bits settles those without a search
        bits = min(_FILTER_BITS_MAX, (_FILTER_SLOTS_A_HASH * (len(self._hashes) + 1)).bit_length())
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, np.bool_)
        self._filter[self._slots(self._hashes)] = True

    def __len__(self) -> int:
        return len(self._hashes)

    def _slots(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return hashes >> self._shift

    def shared_spans(self, tokens: Tokens) -> int:
        """Returns how many spans of `tokens` are in the index."""
        hashes = span_hashes(tokens, self.span_tokens)
        hashes = hashes[self._filter[self._slots(hashes)]]
        # a binary search a span: numpy's isin would sort the whole index again for every document
        places = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        return int((self._hashes[places] == hashes).sum()) if len(self._hashes) else 0


def near_duplicates(
    documents: Sequence[Tokens], share: float = 0.5, span_tokens: int = SPAN_TOKENS
) -> NDArray[np.bool_]:
    """Marks documents most of whose spans an earlier document holds already.

    Spans are sampled by their hash (one in 16), so the sample is the same in every document.

    Args:
        documents: tokens of each document, in the order that decides which copy stays.
        share: a document is marked when more than this share of its sampled spans occurred before.
        span_tokens: length of a span in tokens.

    Returns:
        [len(documents)] True for documents to drop.
    """
    sampled = []
    for tokens in documents:
        hashes = span_hashes(tokens, span_tokens)
        sampled.append(np.unique(hashes[(hashes & np.uint64(15)) == 0]))
    owners = np.repeat(np.arange(len(sampled)), [len(hashes) for hashes in sampled])
    if not len(owners):
        return np.zeros(len(documents), np.bool_)
    _, first, inverse = np.unique(np.concatenate(sampled), return_index=True, return_inverse=True)
    repeated = np.bincount(owners, weights=owners[first][inverse] < owners, minlength=len(documents))
    total = np.bincount(owners, minlength=len(documents))
    return np.asarray(repeated > share * np.maximum(total, 1))
