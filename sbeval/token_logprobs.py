"""The adapter's own request type, `token_logprobs`, as tasks write it and the adapter reads it.

A window of context length L is exactly L model inputs: one lead-in token, then its first L - 1 targets; it scores its
last `scored` targets. Texts and token lists never travel in a request: `key` names a token range that
`sbeval.corpora.resolve_tokens` turns into tokens on both sides.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TOKEN_LOGPROBS = "token_logprobs"
ATTENTION_SPAN = "attention_span"


class TokenLogprobsRequest(NamedTuple):
    """Arguments of one request; a plain tuple, as lm-eval expects.

    Attributes:
        key: names the L target tokens of the window (`sbeval.corpora.token_key`).
        context_length: L, the number of model inputs.
        lead_in: token id fed before the first target.
        scored: how many of the last targets to score, 1 to L.
    """

    key: str
    context_length: int
    lead_in: int
    scored: int


class TokenLogprobs(float):
    """Sum of a window's log-probabilities in nats, carrying each of them in `logprobs` (float32 [scored]).

    A float, so that logged samples hold one number a request instead of 65,536.
    """

    logprobs: NDArray[np.float32]

    def __new__(cls, logprobs: NDArray[np.float32]) -> "TokenLogprobs":
        """Sums `logprobs` in fp64."""
        self = super().__new__(cls, float(logprobs.sum(dtype=np.float64)))
        self.logprobs = logprobs
        return self

    def __reduce__(self) -> tuple[type["TokenLogprobs"], tuple[NDArray[np.float32]]]:
        return (TokenLogprobs, (self.logprobs,))


class AttentionSpanRequest(NamedTuple):
    """Arguments of one request; a plain tuple, as lm-eval expects.

    The response is a list with one row for each layer and head: [layer, head, span at 50 %, at 90 %, at 99 %, remaining
    stick], spans in keys, each the mean over the queries; a span is None where a head gave no weight to any key.

    Attributes:
        key: names the L inputs (`sbeval.corpora.token_key`).
        context_length: L.
        queries: how many of the last positions are looked at.
    """

    key: str
    context_length: int
    queries: int
