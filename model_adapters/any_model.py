"""Scores the requests of this project's tasks with any lm-eval model that scores tokens (`TemplateLM`), such as `vllm`.

The only scoring method that all these models share is `_loglikelihood_tokens`. It returns the sum of the
log-probabilities of a continuation, but not those of single tokens; these would need separate code for each inference
engine. So a task names the positions at which sums must be separate (`cuts`), such as the end of a document. The
targets between two cuts are a chunk: the model scores it in a separate call, with everything before it as context.
"""

import hashlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.instance import Instance
from numpy.typing import NDArray

from sbeval.corpora import resolve_tokens
from sbeval.errors import UserError
from sbeval.model_adapters.answers import request_name
from sbeval.model_adapters.backend import Backend
from sbeval.model_adapters.open.tokenizer import warn_of_other_tokens
from sbeval.rope_parameters import LENGTH_DEPENDENT, kind_of, rope_entries
from sbeval.scoring.requests import TargetLogprobs, TargetSequence, TokenLogprobs, resolve_sequence

# named below `lm_eval`, because lm-eval shows INFO lines of its own loggers only
logger = logging.getLogger("lm_eval.sbeval.any_model")

_TOKENS_A_CALL = 2**22  # as Python integers these take about 150 MB
Arguments = tuple[Any, ...]
Load = Callable[..., TargetSequence]


class _Chunk(NamedTuple):
    """Consecutive targets, numbers `first` to `stop` - 1, of the request with these `arguments`.

    `context` is the number of tokens before the targets, and `tokens` the number of all tokens. Chunks with the same
    tokens but another number of targets have different `turn`s and so run in different calls: within one call, `hf`
    would answer one chunk with the logits of the other.
    """

    arguments: Arguments
    first: int
    stop: int
    context: int
    tokens: int
    turn: int


def token_logprobs(lm: Any, requests: Sequence[Instance], *, quiet: bool) -> list[TokenLogprobs]:
    """Returns log-probabilities of targets; only their sum between two cuts is the model's.

    The model returns only this sum, of which each target gets an equal part.
    """
    if callable(getattr(getattr(lm, "tokenizer", None), "get_vocab", None)):
        warn_of_other_tokens(lm.tokenizer, [request.args[0] for request in requests])
    return [TokenLogprobs(logprobs) for logprobs, _ in _answers(lm, requests, _window, quiet=quiet)]


def target_logprobs(lm: Any, requests: Sequence[Instance], *, quiet: bool) -> list[TargetLogprobs]:
    """Returns log-probabilities as `token_logprobs` does, and for each target whether it is the most probable token.

    The latter is true only if it is true for all targets between the same two cuts.
    """
    if any(kind.__name__ == "SGLANGGENERATEAPI" for kind in type(lm).__mro__):
        raise UserError(
            "This task needs to know which tokens are the most probable, and lm-eval inverts that answer for "
            "sglang-generate: use local-completions, which SGLang's server answers too."
        )
    answers = _answers(lm, requests, lambda key, inputs: resolve_sequence(key), quiet=quiet)
    return [TargetLogprobs(*answer) for answer in answers]


def _window(key: str, length: int, lead_in: int, scored: int) -> TargetSequence:
    tokens = np.asarray(resolve_tokens(key), dtype=np.int64)
    inputs = np.concatenate([np.array([lead_in]), tokens[:-1]])
    return TargetSequence(inputs, np.arange(length - scored, length), tokens[-scored:])


def _answers(
    lm: Any, requests: Sequence[Instance], load: Load, *, quiet: bool
) -> list[tuple[NDArray[np.float32], NDArray[np.bool_]]]:
    """Returns, for each request, the log-probabilities of its targets and whether they are the most probable tokens.

    Equal requests and equal chunks are scored once.
    """
    backend = Backend.of(lm)
    cuts: dict[Arguments, set[int]] = defaultdict(set)
    for request in requests:
        cuts[tuple(request.args)].update(request.cuts())
    names, chunks = _plan(cuts, load)
    scores = {name: stored for name in chunks if (stored := backend.cached_score(name)) is not None}
    unscored = {name: chunk for name, chunk in chunks.items() if name not in scores}
    backend.check_room(max((chunk.tokens for chunk in unscored.values()), default=0))
    askers = {tuple(request.args): request_name(request) for request in reversed(requests)}
    logger.info(
        "%s: %d windows need %d requests with %s tokens in total; %d more requests are answered by --use_cache",
        *(backend.name, len(cuts), len(unscored), f"{sum(chunk.tokens for chunk in unscored.values()):,}", len(scores)),
    )
    rope = rope_entries(getattr(backend.config(), "rope_parameters", None))
    if len(chunks) > len(cuts) and any(kind_of(entry) in LENGTH_DEPENDENT for entry in rope.values()):
        logger.warning(
            "the model's RoPE depends on the input's length: chunks before the last are scored as shorter inputs"
        )
    for call in _calls(unscored):
        sequences = [load(*unscored[name].arguments) for name in call]
        texts = [
            (of.inputs_L[: chunk.context].tolist(), of.targets_T[chunk.first : chunk.stop].tolist())
            for of, chunk in zip(sequences, map(unscored.__getitem__, call), strict=True)
        ]
        named = {name: askers[unscored[name].arguments] for name in call}
        scores |= backend.score(dict(zip(call, texts, strict=True)), named, len(scores), len(chunks), quiet=quiet)
    counts = {name: chunk.stop - chunk.first for name, chunk in chunks.items()}
    answers = {}
    for arguments, of_request in names.items():
        sums, greedy = zip(*map(scores.__getitem__, of_request), strict=True)
        targets = [counts[name] for name in of_request]  # each target gets an equal part of the sum of its chunk
        shares = np.divide(sums, targets).astype(np.float32)
        answers[arguments] = (np.repeat(shares, targets), np.repeat(np.array(greedy), targets))
    return [answers[tuple(request.args)] for request in requests]


def _plan(cuts: Mapping[Arguments, Iterable[int]], load: Load) -> tuple[dict[Arguments, list[str]], dict[str, _Chunk]]:
    """Returns the names of each request's chunks, and the chunks by name; a name is a hash of the chunk's tokens."""
    names: dict[Arguments, list[str]] = defaultdict(list)
    chunks: dict[str, _Chunk] = {}
    contexts: dict[str, list[int]] = defaultdict(list)
    for arguments, places in cuts.items():
        inputs, positions, targets = load(*arguments)
        follows = np.diff(positions) == 1
        follows[follows] = inputs[positions[1:][follows]] == targets[:-1][follows]
        begins = {0, *places, *(np.flatnonzero(~follows) + 1).tolist()} & {*range(len(targets))}
        for first, stop in itertools.pairwise([*sorted(begins), len(targets)]):
            context = int(positions[first]) + 1
            tokens_hash = hashlib.sha256(inputs[: int(positions[stop - 1]) + 1].tobytes()).hexdigest()
            if context not in contexts[tokens_hash]:
                contexts[tokens_hash].append(context)
            name = f"{tokens_hash}:{context}:{targets[stop - 1]}"
            names[arguments].append(name)
            turn = contexts[tokens_hash].index(context)
            chunks.setdefault(name, _Chunk(arguments, first, stop, context, context + stop - first, turn))
    return names, chunks


def _calls(chunks: Mapping[str, _Chunk]) -> Iterator[list[str]]:
    """Yields, for each call of the model, the names of the chunks to score in it, longest chunks first."""
    order = sorted(chunks, key=lambda name: (chunks[name].turn, -chunks[name].tokens))
    ends = itertools.accumulate(chunks[name].tokens for name in order)
    call_of = {name: (chunks[name].turn, end // _TOKENS_A_CALL) for name, end in zip(order, ends, strict=True)}
    for _, call in itertools.groupby(order, key=call_of.__getitem__):
        yield list(call)
