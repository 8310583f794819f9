"""The adapter's own lm-eval request types: their arguments, responses, and the file that holds token sequences.

`token_logprobs`: log-probabilities of a window of text. A window of context length L is exactly L model inputs: one
token before the first target (`lead_in`, such as BOS), then the first L - 1 targets. Only the last `scored` of its L
targets are scored. Requests hold neither texts nor token lists: `key` names a token range, which task and adapter look
up with `sbeval.corpora.resolve_tokens`.

`target_logprobs`: log-probabilities of answers inside a sequence. A request names (position, target) pairs; each target
is scored at the output of its position, which depends on the inputs up to that position. Targets need not be the next
tokens of the sequence. Many sequences are written to one file, and `key` names the file and the row.

`attention_span`: how far back every layer and head looks.

An `Instance` of the first two types also has a function `cuts`, for models that return only sums of log-probabilities.
It returns the indices, counted from 0 among the scored targets, at which a new sum begins. (With `target_logprobs` a
new sum also begins at every target that is not the sequence's next token.)

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
"""What happens to a request whose logits are NaN or infinite: an error, or null in the results."""

# response caches of older versions hold answers pickled under these module names
for _former_module in ("sbeval.token_logprobs", "sbeval.target_logprobs"):
    sys.modules.setdefault(_former_module, sys.modules[__name__])


class Answer(str):
    """A generated answer, a `str` with `facts` about its generation, which a response cache stores with the text."""

    facts: Mapping[str, Any]

    def __new__(cls, text: str, **facts: Any) -> Self:
        """Makes the answer with the text and its facts."""
        self = super().__new__(cls, text)
        self.facts = facts
        return self


class TokenLogprobsRequest(NamedTuple):
    """Arguments of one `token_logprobs` request; a plain tuple, as lm-eval expects.

    Attributes:
        key: names the L target tokens of the window (`sbeval.corpora.token_key`).
        context_length: L, the number of model inputs.
        lead_in: id of the input token before the first target.
        scored: how many of the last targets to score, 1 to L.
    """

    key: str
    context_length: int
    lead_in: int
    scored: int


class TokenLogprobs(float):
    """The sum of a window's log-probabilities in nats; `logprobs`, float32 [scored], holds each of them.

    It is a float, so that logged samples hold one number for each request instead of 65,536.
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
    """Arguments of one `attention_span` request; a plain tuple, as lm-eval expects.

    The response is a list with one row for each layer and head: [layer, head, span at 50 %, at 90 %, at 99 %, remaining
    stick, weight on the first token, entropy]. A span at 90 % is the number of newest keys that together hold 90 % of a
    query's weight; the remaining stick is the weight that no key received. The entropy is in nats. Each value is the
    mean over the queries. Spans and entropy are None if a head gave no weight to any key.

    Attributes:
        key: names the L inputs (`sbeval.corpora.token_key`).
        context_length: L.
        queries: number of last positions of the window; the means are over their queries.
    """

    key: str
    context_length: int
    queries: int


class TargetSequence(NamedTuple):
    """Model inputs, integers [L], the positions [T] whose outputs are scored, and their target tokens [T]."""

    inputs_L: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    targets_T: NDArray[np.int64]


class TargetLogprobsRequest(NamedTuple):
    """Arguments of one `target_logprobs` request: a sequence's key (`keep_sequences`) and L, its number of inputs."""

    key: str
    inputs: int


class TargetLogprobs(float):
    """The sum of the targets' log-probabilities in nats.

    It is a float, so that logged samples hold one number for each request.

    Attributes:
        logprobs: float32 [T], each target's log-probability.
        greedy: bool [T], whether each target is the most probable token.
    """

    logprobs: NDArray[np.float32]
    greedy: NDArray[np.bool_]

    def __new__(cls, logprobs: NDArray[np.float32], greedy: NDArray[np.bool_]) -> "TargetLogprobs":
        """Sums `logprobs` in fp64."""
        self = super().__new__(cls, float(logprobs.sum(dtype=np.float64)))
        self.logprobs, self.greedy = logprobs, greedy
        return self

    def __reduce__(self) -> tuple[type["TargetLogprobs"], tuple[NDArray[np.float32], NDArray[np.bool_]]]:
        return (TargetLogprobs, (self.logprobs, self.greedy))


def keep_sequences(sequences: Sequence[TargetSequence]) -> list[TargetLogprobsRequest]:
    """Writes sequences to one file in the cache folder, named by its content hash, and returns a request for each.

    Raises:
        UserError: the folder cannot be written.
    """
    arrays: dict[str, Any] = {
        name: np.concatenate([np.asarray(sequence[field], dtype=np.int32) for sequence in sequences])
        for field, name in enumerate(("inputs", "positions", "targets"))
    }
    for name, field in (("input_counts", 0), ("target_counts", 2)):
        arrays[name] = np.array([len(sequence[field]) for sequence in sequences], dtype=np.int64)
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays.values())).hexdigest()[:32]
    path = _path(digest)
    if not path.exists():
        with whole_file(path, "token sequences") as temporary_path, temporary_path.open("wb") as file:
            np.savez(file, **arrays)
    return [
        TargetLogprobsRequest(f"{digest}:{row}", int(count))
        for row, count in enumerate(arrays["input_counts"].tolist())
    ]


def resolve_sequence(key: str) -> TargetSequence:
    """Returns the sequence that a request's key names.

    Raises:
        UserError: the file with the sequence is not in this machine's cache folder.
    """
    digest, _, row = key.partition(":")
    arrays, input_ends, target_ends = _open(str(_path(digest)))
    inputs = slice(input_ends[int(row)], input_ends[int(row) + 1])
    targets = slice(target_ends[int(row)], target_ends[int(row) + 1])
    slices = {"inputs": inputs, "positions": targets, "targets": targets}
    return TargetSequence(*(arrays[name][rows].astype(np.int64) for name, rows in slices.items()))


@functools.lru_cache(maxsize=8)
def _open(path: str) -> tuple[dict[str, NDArray[np.int32]], list[int], list[int]]:
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
        raise UserError(
            f"The task's token sequences are missing: there is no file {path!r}. Set SBEVAL_CACHE to the same folder "
            "for every process, or run the task again."
        ) from None
    input_ends, target_ends = ([0, *np.cumsum(arrays[name]).tolist()] for name in ("input_counts", "target_counts"))
    return arrays, input_ends, target_ends


def _path(digest: str) -> Path:
    return cache_folder("targets") / f"targets1-{digest}.npz"
