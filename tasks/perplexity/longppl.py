"""LongPPL: perplexity on the tokens that need their long context, chosen by one named evaluator model.

After Fang et al., "What is Wrong with Perplexity for Long-context Language Modeling?" (arXiv 2410.23771): a target is a
key token if the evaluator gains more than `LEAST_GAIN_NATS` on it from the long context over the short one, and its
log-probability with the long one is above `LEAST_LOGPROB_NATS`. Here the long and the short context are the run's
longest and shortest length, so that the key tokens are the same at every length and for every model. The evaluator's
log-probabilities are therefore kept on disk: they are the same for every model it judges.

An evaluator with another tokenizer reads the same text in its own tokens. As in the authors' code, key tokens are then
matched by characters: a target is one if it lies inside neighbouring key tokens of the evaluator's.
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
"""The type that a checkpoint's own configuration names."""
_LEAD_TOKENS = 16
Pair = tuple[TokenLogprobsRequest, TokenLogprobsRequest]


def key_tokens(
    evaluator: str, pairs: Sequence[Pair], *, tokenizer: Any, tokenizer_hash: str, dtype: str = OWN_DTYPE
) -> list[NDArray[np.bool_]]:
    """Returns, for each pair of requests with the same targets, which targets are key tokens.

    The evaluator, a folder or hub id of a causal language model, is loaded where an answer is not kept from an earlier
    run, used and let go. Pairs are requests at the short and the long context, and `tokenizer` stands behind them.

    Raises:
        UserError: the evaluator does not load, or has another tokenizer, and one that tells no character offsets.
    """
    judge = _Evaluator(evaluator, tokenizer_hash, dtype)
    if judge.same_tokenizer:
        masks = [_need_context(judge.logprobs(short), judge.logprobs(long)) for short, long in pairs]
    else:
        masks = [judge.matched(short, long, tokenizer) for short, long in pairs]
    judge.cache.write()
    return masks


def _need_context(short_logprobs: NDArray[np.float64], long_logprobs: NDArray[np.float64]) -> NDArray[np.bool_]:
    gain = long_logprobs - short_logprobs
    return np.asarray((gain > LEAST_GAIN_NATS) & (long_logprobs > LEAST_LOGPROB_NATS))


def places_from_end(tokenizer: Any, tokens: Sequence[int], count: int) -> NDArray[np.int64]:
    """Returns how far from the text's end each of the last tokens begins, in characters, int64 [count].

    What the beginning of a cut text decodes to does not matter, since it is counted from the end. A token that only
    ends a character begins where that character does.
    """
    tail = list(tokens[-count - _LEAD_TOKENS :])
    ends = np.array([len(decoded(tokenizer, tail[: len(tail) - left])) for left in range(count, -1, -1)])
    begins = ends[-1] - ends
    for index in range(1, count):
        if begins[index] == begins[index + 1]:
            begins[index] = begins[index - 1]
    return np.asarray(begins[:-1], dtype=np.int64)


def decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Returns the text of tokens as it stands."""
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
                "Expected a LongPPL evaluator with the evaluated model's tokenizer or one that tells character "
                f"offsets, found neither in {name!r}: name an evaluator with a fast tokenizer."
            )

    def logprobs(self, request: TokenLogprobsRequest) -> NDArray[np.float64]:
        """Returns the log-probabilities of a request's scored targets, float64 [scored]."""
        lead_in = request.lead_in
        key = request.key
        scored = request.scored
        return self.cache.kept(request, lambda: self._computed(lead_in, resolve_tokens(key), scored))

    def matched(self, short: TokenLogprobsRequest, long: TokenLogprobsRequest, tokenizer: Any) -> NDArray[np.bool_]:
        """Returns which targets lie inside key tokens of the evaluator's own, bool [scored]."""
        name = ("inside characters", *short, *long, LEAST_GAIN_NATS, LEAST_LOGPROB_NATS)
        return self.cache.kept(name, lambda: self._matched(short, long, tokenizer).astype(np.float64)) > 0

    def _matched(self, short: TokenLogprobsRequest, long: TokenLogprobsRequest, tokenizer: Any) -> NDArray[np.bool_]:
        texts = [resolve_tokens(request.key).tolist() for request in (short, long)]
        begins = places_from_end(tokenizer, texts[1], long.scored)
        ends = np.minimum(np.append(begins[1:], 0), begins - 1)  # each piece of a character holds all of it
        read = [self._read(decoded(tokenizer, tokens)) for tokens in texts]
        # tokens that end among the targets, as far back as both contexts have the same
        within = min(int((theirs < begins[0]).sum()) for _, _, theirs in read)
        alike = read[0][0][-within:] == read[1][0][-within:] if within else np.zeros(0, dtype=bool)
        count = int(np.logical_and.accumulate(alike[::-1]).sum())
        if not count:
            return np.zeros(long.scored, dtype=bool)
        lead_in = prefix_token_id(self._tokenizer)
        key = np.flatnonzero(_need_context(*(self._computed(lead_in, tokens, count) for tokens, _, _ in read)))
        _, key_begins, key_ends = (values[-count:][key] for values in read[1])
        # key tokens that follow one another are one stretch of characters
        apart = key_begins[1:] != key_ends[:-1]
        key_begins = key_begins[np.r_[True, apart][: len(key)]]
        key_ends = key_ends[np.r_[apart, True][: len(key)]]
        return np.asarray(((key_begins >= begins[:, None]) & (key_ends <= ends[:, None])).any(axis=1))

    def _read(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns the evaluator's tokens of a text, and how far from its end each begins and ends, int64 [tokens]."""
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        # many tokenizers leave the space that a token begins with out of its offsets
        for place in np.flatnonzero(offsets[1:, 0] > offsets[:-1, 1]):
            if not text[offsets[place, 1] : offsets[place + 1, 0]].strip():
                offsets[place + 1, 0] = offsets[place, 1]
        return np.array(encoded["input_ids"], dtype=np.int64), len(text) - offsets[:, 0], len(text) - offsets[:, 1]

    def _computed(self, lead_in: int, tokens: NDArray[Any], scored: int) -> NDArray[np.float64]:
        """Returns the log-probabilities of the last `scored` tokens behind a lead-in and the others, float64."""
        import torch  # lm-eval lists tasks without torch, and only an evaluator needs it

        scorer, device = self._scorer
        targets = torch.from_numpy(tokens.astype(np.int64))
        inputs = torch.cat([torch.tensor([lead_in]), targets[:-1]])[None].to(device)
        positions = torch.arange(len(targets) - scored, len(targets))
        scores = scorer.score(inputs, torch.zeros_like(positions), positions, targets[-scored:])
        return np.asarray(scores.logprobs.numpy(), np.float64)

    @cached_property
    def _scorer(self) -> tuple[Any, Any]:
        import torch  # as above
        from transformers import AutoModelForCausalLM  # as above

        import sbeval.models  # noqa: F401  registers the family with transformers' Auto classes
        from sbeval.checkpoints.load import load_whole  # as above
        from sbeval.scoring.scorer import TokenScorer  # as above

        try:
            model: Any = load_whole(AutoModelForCausalLM, str(self._name), dtype=self._dtype)
        except (OSError, ValueError, KeyError) as error:
            raise self._does_not_load(error) from error
        device = torch.device(_device())
        return TokenScorer(model.to(device).eval()), device

    def _does_not_load(self, error: Exception) -> UserError:
        reason = first_line(error.__cause__ if isinstance(error, UserError) and error.__cause__ else error)
        expected = f"Expected an evaluator model for LongPPL at {self._name!r}"
        return UserError(f"{expected}, found none that loads ({reason}): correct longppl_evaluator.")


Named = tuple[Any, ...]
_SECONDS_TO_WAIT = 60.0
_ANSWERS_A_WRITE = 32


class EvaluatorCache:
    """One evaluator's answers, by request or the name of what was asked; several processes may share it.

    A request names its text and tokenizer by their hashes, and the file names the evaluator by its fingerprint
    (`evaluator_identity`), so that an answer never belongs to another text or model.
    """

    def __init__(self, identity: str) -> None:
        self._path = cache_folder("longppl") / f"{sha256(identity.encode()).hexdigest()[:20]}.sqlite"
        self._waiting: dict[str, bytes] = {}

    def kept(self, request: Named, make: Callable[[], NDArray[np.float64]]) -> NDArray[np.float64]:
        """Returns what was asked for, float64 [scored]; what had to be made is on disk after some more, or `write`."""
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
        """Writes what is not yet on disk."""
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
            expected = f"Expected to keep a LongPPL evaluator's log-probabilities in {str(self._path)!r}"
            remedy = "set SBEVAL_CACHE to a folder with space that you may write to, or remove the file"
            raise UserError(f"{expected}, found that this fails ({error}): {remedy}.") from error


def evaluator_identity(evaluator: str, dtype: str = OWN_DTYPE) -> str:
    """Returns what tells an evaluator from others: its checkpoint by content, dtype, device and versions.

    Raises:
        OSError: one of its files cannot be read.
    """
    return json.dumps([checkpoint_parts(evaluator) | versions(), dtype, _device()], sort_keys=True)


def _device() -> str:
    import torch  # as above

    return "cuda" if torch.cuda.is_available() else "cpu"
