"""From the model's answers to the sums a sample logs."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import TokenizedCorpus
from sbeval.corpora.windows import Window
from sbeval.errors import UserError
from sbeval.records import ClusterSums


def checked_nll(task: str, window: Window, answer: Any) -> NDArray[np.float64]:
    """Returns the NLL in nats of a window's scored targets, float64 [scored].

    Args:
        task: name for the error.
        window: what was asked for.
        answer: the model's answer, with float `logprobs` [scored].

    Raises:
        ValueError: the answer has another number of log-probabilities.
        UserError: a log-probability is not finite.
    """
    logprobs = np.asarray(answer.logprobs, np.float64)
    if logprobs.shape != (window.scored,):
        raise ValueError(f"expected {window.scored} log-probabilities from the model, found shape {logprobs.shape}")
    if not np.isfinite(logprobs).all():
        first = window.stop - window.scored + int(np.argmin(np.isfinite(logprobs)))
        raise UserError(
            f"{task}: expected finite log-probabilities, found {logprobs[first - window.stop]} for token "
            f"{first - window.start + 1} of a window of {window.stop - window.start}: try dtype=float32."
        )
    return -logprobs


def document_rows(
    corpus: TokenizedCorpus, windows: Iterable[Window], nll: Mapping[Window, NDArray[np.float64]]
) -> list[ClusterSums]:
    """Adds the scored targets of some windows up by source document.

    Args:
        corpus: where the windows lie.
        windows: one block's, at one context length.
        nll: NLL in nats of each window's scored targets, float64 [scored].
    """
    sums: dict[int, list[float]] = {}
    for window in windows:
        for part in corpus.document_sums(window.stop - window.scored, nll[window]):
            row = sums.setdefault(part.document, [0.0, 0.0, 0.0, 0.0])
            for column, value in enumerate(part[1:]):
                row[column] += value
    return [
        ClusterSums(corpus.names[document], nats, int(tokens), words, size)
        for document, (nats, tokens, words, size) in sums.items()
    ]
