"""LongPPL: selects the key tokens, the targets that need a long context, with an evaluator model.

After Fang et al., "What is Wrong with Perplexity for Long-context Language Modeling?" (arXiv 2410.23771). A target is a
key token if its log-probability under the evaluator is more than `LEAST_GAIN_NATS` higher with a long context than with
a short one, and is above `LEAST_LOGPROB_NATS` with the long one. The long and the short context are the run's longest
and shortest context length, so the key tokens are the same at every length and for every evaluated model. The
evaluator's log-probabilities can therefore be cached on disk.

An evaluator with another tokenizer reads the same text in its own tokens. As in the authors' code, key tokens are then
matched by characters: a target is a key token if its characters lie inside those of adjacent key tokens of the
evaluator.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbeval.corpora import cache_folder, prefix_token_id, resolve_tokens, tokenizer_sha256
from sbeval.corpora.tokenizers import load_tokenizer
from sbeval.errors import UserError, first_line
from sbeval.fingerprint.checkpoint import checkpoint_parts
from sbeval.fingerprint.parts import versions
from sbeval.scoring.requests import TokenLogprobsRequest

LEAST_GAIN_NATS = 2.0
LEAST_LOGPROB_NATS = -2.0
OWN_DTYPE = "auto"
"""Load the evaluator in the dtype that its config.json names."""
# this many tokens before the counted ones are decoded too: a character that is cut off at the start of the decoded text
# then does not change the characters of the counted tokens
_LEAD_TOKENS = 16
Pair = tuple[TokenLogprobsRequest, TokenLogprobsRequest]


def key_tokens(
    evaluator: str, pairs: Sequence[Pair], *, tokenizer: Any, tokenizer_hash: str, dtype: str = OWN_DTYPE
) -> list[NDArray[np.bool_]]:
    """Returns, for each pair of requests, whether each target is a key token: a list of bool [scored].

    Args:
        evaluator: folder or hub id of a causal language model. It is loaded only if the cache lacks an answer.
        pairs: requests for the same targets with the short and with the long context.
        tokenizer: the tokenizer of the requests' tokens.
        tokenizer_hash: hash of that tokenizer.
        dtype: the dtype in which the evaluator is loaded.

    Raises:
        UserError: the evaluator does not load, or it has another tokenizer that gives no character offsets.
    """
    model = _Evaluator(evaluator, tokenizer_hash, dtype)
    if model.same_tokenizer:
        masks = [_need_context(model.logprobs(short), model.logprobs(long)) for short, long in pairs]
    else:
        masks = [model.matched(short, long, tokenizer) for short, long in pairs]
    model.cache.write()
    return masks


def _need_context(short_logprobs: NDArray[np.float64], long_logprobs: NDArray[np.float64]) -> NDArray[np.bool_]:
    gain = long_logprobs - short_logprobs
    return np.asarray((gain > LEAST_GAIN_NATS) & (long_logprobs > LEAST_LOGPROB_NATS))


def places_from_end(tokenizer: Any, tokens: Sequence[int], count: int) -> NDArray[np.int64]:
    """Returns the first character of each of the last `count` tokens, counted from the end of the text, int64 [count].

    Distances are counted from the end because the first token of a truncated text may decode to other characters. A
    token that only completes a character begins where that character begins.
    """
    tail = list(tokens[-count - _LEAD_TOKENS :])
    ends = np.array([len(decoded(tokenizer, tail[: len(tail) - left])) for left in range(count, -1, -1)])
    begins = ends[-1] - ends
    for index in range(1, count):
        if begins[index] == begins[index + 1]:
            begins[index] = begins[index - 1]
    return np.asarray(begins[:-1], dtype=np.int64)


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decodes tokens without removing special tokens or cleaning up spaces."""
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class _Evaluator:
    """The evaluator model, loaded when a request needs it."""

    def __init__(self, name: str, tokenizer_hash: str, dtype: str) -> None:
        self._name = name
        self._dtype = dtype
        try:
            self._tokenizer = load_tokenizer(name)
            self.same_tokenizer = tokenizer_sha256(self._tokenizer) == tokenizer_hash
            self.cache = EvaluatorCache(evaluator_identity(name, dtype))
        except (OSError, ValueError, KeyError) as error:
            raise self._does_not_load(error) from error
        if not self.same_tokenizer and not self._tokenizer.is_fast:
            raise UserError(
                f"The LongPPL evaluator {name!r} has neither the evaluated model's tokenizer nor a fast one, which "
                "gives character offsets: name an evaluator with a fast tokenizer."
            )

    def logprobs(self, request: TokenLogprobsRequest) -> NDArray[np.float64]:
        """Returns the log-probabilities of a request's scored targets, float64 [scored]."""
        lead_in = request.lead_in
        key = request.key
        scored = request.scored
        return self.cache.get_or_make(request, lambda: self._computed(lead_in, resolve_tokens(key), scored))

    def matched(self, short: TokenLogprobsRequest, long: TokenLogprobsRequest, tokenizer: Any) -> NDArray[np.bool_]:
        """Returns whether the characters of each target lie inside key tokens of the evaluator, bool [scored]."""
        name = ("inside characters", *short, *long, LEAST_GAIN_NATS, LEAST_LOGPROB_NATS)
        return self.cache.get_or_make(name, lambda: self._matched(short, long, tokenizer).astype(np.float64)) > 0

    def _matched(self, short: TokenLogprobsRequest, long: TokenLogprobsRequest, tokenizer: Any) -> NDArray[np.bool_]:
        texts = [resolve_tokens(request.key).tolist() for request in (short, long)]
        begins = places_from_end(tokenizer, texts[1], long.scored)
        ends = np.minimum(np.append(begins[1:], 0), begins - 1)  # a token with a part of a character spans all of it
        read = [self._read(decoded(tokenizer, tokens)) for tokens in texts]
        # the evaluator's tokens that end among the targets, as long as they are the same with both contexts
        within = min(int((token_ends < begins[0]).sum()) for _, _, token_ends in read)
        equal = read[0][0][-within:] == read[1][0][-within:] if within else np.zeros(0, dtype=bool)
        count = int(np.logical_and.accumulate(equal[::-1]).sum())
        if not count:
            return np.zeros(long.scored, dtype=bool)
        lead_in = prefix_token_id(self._tokenizer)
        key = np.flatnonzero(_need_context(*(self._computed(lead_in, tokens, count) for tokens, _, _ in read)))
        _, key_begins, key_ends = (values[-count:][key] for values in read[1])
        # adjacent key tokens form one range of characters
        apart = key_begins[1:] != key_ends[:-1]
        key_begins = key_begins[np.r_[True, apart][: len(key)]]
        key_ends = key_ends[np.r_[apart, True][: len(key)]]
        return np.asarray(((key_begins >= begins[:, None]) & (key_ends <= ends[:, None])).any(axis=1))

    def _read(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns the evaluator's tokens of a text, and where each begins and ends, all int64 [tokens].

        Positions are in characters from the end of the text.
        """
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        # many tokenizers exclude the leading space of a token from its offsets
        for place in np.flatnonzero(offsets[1:, 0] > offsets[:-1, 1]):
            if not text[offsets[place, 1] : offsets[place + 1, 0]].strip():
                offsets[place + 1, 0] = offsets[place, 1]
        return np.array(encoded["input_ids"], dtype=np.int64), len(text) - offsets[:, 0], len(text) - offsets[:, 1]

    def _computed(self, lead_in: int, tokens: NDArray[Any], scored: int) -> NDArray[np.float64]:
        """Computes the log-probabilities of the last `scored` tokens, float64 [scored].

        The token `lead_in` is fed to the model before `tokens`.
        """
        import torch  # imported late: only an evaluator needs torch, and lm-eval lists tasks without it

        scorer, device = self._scorer
        targets = torch.from_numpy(tokens.astype(np.int64))
        inputs = torch.cat([torch.tensor([lead_in]), targets[:-1]])[None].to(device)
        positions = torch.arange(len(targets) - scored, len(targets))
        scores = scorer.score(inputs, torch.zeros_like(positions), positions, targets[-scored:])
        return np.asarray(scores.logprobs.numpy(), np.float64)

    @cached_property
    def _scorer(self) -> tuple[Any, Any]:
        import torch  # imported late: only an evaluator needs it
        from transformers import AutoModelForCausalLM  # imported late: only an evaluator needs it

        import sbeval.models  # noqa: F401  registers the family with transformers' Auto classes
        from sbeval.checkpoints.load import load_whole  # imports torch
        from sbeval.scoring.scorer import TokenScorer  # imports torch

        try:
            model: Any = load_whole(AutoModelForCausalLM, str(self._name), dtype=self._dtype)
        except (OSError, ValueError, KeyError) as error:
            raise self._does_not_load(error) from error
        device = torch.device(_device())
        return TokenScorer(model.to(device).eval()), device

    def _does_not_load(self, error: Exception) -> UserError:
        reason = first_line(error.__cause__ if isinstance(error, UserError) and error.__cause__ else error)
        return UserError(f"The LongPPL evaluator {self._name!r} does not load ({reason}): correct longppl_evaluator.")


Named = tuple[Any, ...]
_SECONDS_TO_WAIT = 60.0
_ANSWERS_A_WRITE = 32


class EvaluatorCache:
    """A cache on disk of one evaluator's answers by request; several processes may use it at once.

    A request contains the hashes of its text and tokenizer, and the file's name contains the evaluator's fingerprint
    (`evaluator_identity`), so a cached answer never belongs to another text or model.
    """

    def __init__(self, identity: str) -> None:
        self._path = cache_folder("longppl") / f"{sha256(identity.encode()).hexdigest()[:20]}.sqlite"
        self._waiting: dict[str, bytes] = {}

    def get_or_make(self, request: Named, make: Callable[[], NDArray[np.float64]]) -> NDArray[np.float64]:
        """Returns the cached answer to a request, float64 [scored]; if there is none, calls `make` and caches it.

        New answers are written in batches: call `write` after the last request.
        """
        name = json.dumps(list(request))
        answer = self._waiting.get(name) or self._read(name)
        if answer is None:
            answer = self._waiting[name] = make().tobytes()
            if len(self._waiting) >= _ANSWERS_A_WRITE:
                self.write()
        return np.frombuffer(answer, np.float64)

    def _read(self, name: str) -> bytes | None:
        if not self._path.is_file():
            return None
        with self._connection() as connection:
            row = connection.execute("SELECT logprobs FROM answers WHERE request = ?", (name,)).fetchone()
        return None if row is None else bytes(row[0])

    def write(self) -> None:
        """Writes the answers that are not on disk yet."""
        if not self._waiting:
            return
        with self._connection() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, logprobs BLOB)")
            connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", self._waiting.items())
        self._waiting.clear()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self._path, timeout=_SECONDS_TO_WAIT)) as connection, connection:
                yield connection
        except (OSError, sqlite3.Error) as error:
            remedy = "set SBEVAL_CACHE to a writable folder with free space, or remove the file"
            raise UserError(
                f"Could not cache a LongPPL evaluator's log-probabilities in {str(self._path)!r} ({error}): {remedy}."
            ) from error


def evaluator_identity(evaluator: str, dtype: str = OWN_DTYPE) -> str:
    """Returns a fingerprint of an evaluator as JSON: hashes of its checkpoint's files, versions, dtype and device.

    Raises:
        OSError: one of its files cannot be read.
    """
    return json.dumps([checkpoint_parts(evaluator) | versions(), dtype, _device()], sort_keys=True)


def _device() -> str:
    import torch  # imported late: only an evaluator needs it

    return "cuda" if torch.cuda.is_available() else "cpu"
