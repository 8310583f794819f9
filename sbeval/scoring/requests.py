"""The adapter's own request types, as tasks write them and the adapter reads them.

`token_logprobs`: a window of context length L is exactly L model inputs: one lead-in token, then its first L - 1
targets; it scores its last `scored` targets. Texts and token lists never travel in a request: `key` names a token range
that `sbeval.corpora.resolve_tokens` turns into tokens on both sides.

`target_logprobs`, for answers inside a sequence: a request names (position, target) pairs: the log-probability of each
target at the output of its position, given the inputs up to there. Targets need not be the next tokens. Sequences do
not travel in a request: they are written to one file for many, and `key` names the file and the row.

`attention_span`: how far back every layer and head looks.

An `Instance` of the first two also has a function `cuts`, for models that tell sums alone: with which of its scored
targets, counted from 0, does another sum begin? (Of `target_logprobs` also with each that is not the token read next.)

Shape suffixes: L input length, T targets.
"""

import functools
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from sbeval.errors import UserError
from sbeval.keeping.cache import cache_folder
from sbeval.keeping.writing import whole_file

TOKEN_LOGPROBS = "token_logprobs"
TARGET_LOGPROBS = "target_logprobs"
ATTENTION_SPAN = "attention_span"

NonFinite = Literal["error", "null"]
"""What becomes of a request where the model's logits are no numbers."""

# Response caches hold answers pickled under the modules that these classes were once in.
for _former in ("sbeval.token_logprobs", "sbeval.target_logprobs"):
    sys.modules.setdefault(_former, sys.modules[__name__])


class Answer(str):
    """A generated answer with the facts known of it, which a response cache keeps with the text."""

    facts: Mapping[str, Any]

    def __new__(cls, text: str, **facts: Any) -> Self:
        """Keeps both."""
        self = super().__new__(cls, text)
        self.facts = facts
        return self


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
    stick, weight on the first token, entropy], spans in keys and entropy in nats, each the mean over the queries; spans
    and entropy are None where a head gave no weight to any key.

    Attributes:
        key: names the L inputs (`sbeval.corpora.token_key`).
        context_length: L.
        queries: how many of the last positions are looked at.
    """

    key: str
    context_length: int
    queries: int


class TargetSequence(NamedTuple):
    """Model inputs, integers [L], and [T] positions in them whose outputs predict the [T] targets."""

    inputs_L: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    targets_T: NDArray[np.int64]


class TargetLogprobsRequest(NamedTuple):
    """Arguments of one request: the key of a sequence (`keep_sequences`), and L, its number of model inputs."""

    key: str
    inputs: int


class TargetLogprobs(float):
    """Sum of the targets' log-probabilities in nats, carrying each, float32 [T], and bool [T], if it is the largest.

    A float, so that logged samples hold one number a request.
    """

    logprobs: NDArray[np.float32]
    greedy: NDArray[np.bool_]

    def __new__(cls, logprobs: NDArray[np.float32], greedy: NDArray[np.bool_]) -> "TargetLogprobs":
        """Sums in double precision."""
        self = super().__new__(cls, float(logprobs.sum(dtype=np.float64)))
        self.logprobs, self.greedy = logprobs, greedy
        return self

    def __reduce__(self) -> tuple[type["TargetLogprobs"], tuple[NDArray[np.float32], NDArray[np.bool_]]]:
        return (TargetLogprobs, (self.logprobs, self.greedy))


def keep_sequences(sequences: Sequence[TargetSequence]) -> list[TargetLogprobsRequest]:
    """Writes sequences to one file, named by its content, and returns a request for each.

    Raises:
        UserError: the folder cannot be written.
    """
    arrays: dict[str, Any] = {
        name: np.concatenate([np.asarray(sequence[place], dtype=np.int32) for sequence in sequences])
        for place, name in enumerate(("inputs", "positions", "targets"))
    }
    for name, place in (("input_counts", 0), ("target_counts", 2)):
        arrays[name] = np.array([len(sequence[place]) for sequence in sequences], dtype=np.int64)
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays.values())).hexdigest()[:32]
    path = _path(digest)
    if not path.exists():
        with whole_file(path, "token sequences") as part, part.open("wb") as file:
            np.savez(file, **arrays)
    return [
        TargetLogprobsRequest(f"{digest}:{row}", int(count))
        for row, count in enumerate(arrays["input_counts"].tolist())
    ]


def resolve_sequence(key: str) -> TargetSequence:
    """Returns the sequence a request names.

    Raises:
        UserError: it is not on this machine.
    """
    digest, _, row = key.partition(":")
    parts, input_ends, target_ends = _open(str(_path(digest)))
    inputs = slice(input_ends[int(row)], input_ends[int(row) + 1])
    targets = slice(target_ends[int(row)], target_ends[int(row) + 1])
    places = {"inputs": inputs, "positions": targets, "targets": targets}
    return TargetSequence(*(parts[name][place].astype(np.int64) for name, place in places.items()))


@functools.lru_cache(maxsize=8)
def _open(path: str) -> tuple[dict[str, NDArray[np.int32]], list[int], list[int]]:
    try:
        with np.load(path) as file:
            parts = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise UserError(
            f"Expected token sequences in {path!r}, found none: set SBEVAL_CACHE to the same folder for every process, "
            "or run the task again."
        ) from None
    ends = ([0, *np.cumsum(parts[name]).tolist()] for name in ("input_counts", "target_counts"))
    return parts, next(ends), next(ends)


def _path(digest: str) -> Path:
    return cache_folder("targets") / f"targets1-{digest}.npz"
