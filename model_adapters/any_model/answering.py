"""From requests to pieces, and from the sums that come back to answers."""

import hashlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.instance import Instance
from numpy.typing import NDArray

from sbeval.corpora import resolve_tokens
from sbeval.model_adapters.any_model.backend import Backend, Score
from sbeval.model_adapters.any_model.pieces import Piece, pieces
from sbeval.model_adapters.loading import warn_of_other_tokens
from sbeval.scoring import requests as types
from sbeval.scoring.requests import TargetSequence, resolve_sequence

# a child of lm-eval's logger, whose level is INFO: under another name the line would not be shown
logger = logging.getLogger("lm_eval.sbeval.any_model")

_TOKENS_A_CALL = 2**22  # some 150 MB as Python's numbers
Arguments = tuple[Any, ...]
Answer = tuple[NDArray[np.float32], NDArray[np.bool_]]
Load = Callable[[Arguments], TargetSequence]


class _Asked(NamedTuple):
    """A piece to score, of the sequence that a request's arguments name.

    `turn` sets pieces apart that read the same tokens and score different numbers of them: asked in one call, `hf`
    would answer one with the logits of the other.
    """

    arguments: Arguments
    piece: Piece
    tokens: int
    turn: int


Named = Mapping[str, _Asked]


def token_logprobs(lm: Any, requests: Sequence[Instance], *, quiet: bool) -> list[types.TokenLogprobs]:
    """Returns log-probabilities that add up to the model's over every run of targets that a task tells apart."""
    if callable(getattr(lm.tokenizer, "get_vocab", None)):
        warn_of_other_tokens(lm.tokenizer, [request.args[0] for request in requests])
    return [types.TokenLogprobs(logprobs) for logprobs, _ in _answers(lm, requests, _window, quiet=quiet)]


def target_logprobs(lm: Any, requests: Sequence[Instance], *, quiet: bool) -> list[types.TargetLogprobs]:
    """Returns the same for named targets, and whether all of such a run are the most probable tokens."""
    return [types.TargetLogprobs(*answer) for answer in _answers(lm, requests, _sequence, quiet=quiet)]


def _window(arguments: Arguments) -> TargetSequence:
    request = types.TokenLogprobsRequest(*arguments)
    tokens = np.asarray(resolve_tokens(request.key), dtype=np.int64)
    inputs = np.concatenate([np.array([request.lead_in]), tokens[:-1]])
    return TargetSequence(inputs, np.arange(len(tokens) - request.scored, len(tokens)), tokens[-request.scored :])


def _sequence(arguments: Arguments) -> TargetSequence:
    return resolve_sequence(types.TargetLogprobsRequest(*arguments).key)


def _answers(lm: Any, requests: Sequence[Instance], load: Load, *, quiet: bool) -> list[Answer]:
    """Returns the answers in the order of the requests; equal requests, and equal pieces, are asked for once."""
    backend = Backend.of(lm)
    cuts: dict[Arguments, set[int]] = defaultdict(set)
    for request in requests:
        cuts[tuple(request.args)].update(request.cuts())
    of_request, asked = _plan(cuts, load)
    scores = {name: kept for name in asked if (kept := backend.kept(name)) is not None}
    left = {name: piece for name, piece in asked.items() if name not in scores}
    backend.check_room(max((piece.tokens for piece in left.values()), default=0))
    logger.info(
        "%s: %d windows are asked for in %d requests of %s tokens in all; the response cache holds %d more",
        *(backend.name, len(cuts), len(left), f"{sum(piece.tokens for piece in left.values()):,}", len(scores)),
    )
    for call in _calls(left):
        pairs = {name: left[name].piece.pair(load(left[name].arguments)) for name in call}
        scores |= backend.score(pairs, answered=len(scores), planned=len(asked), quiet=quiet)
    joined = {key: _joined([(piece, scores[name]) for name, piece in named]) for key, named in of_request.items()}
    return [joined[tuple(request.args)] for request in requests]


def _plan(
    cuts: Mapping[Arguments, set[int]], load: Load
) -> tuple[dict[Arguments, list[tuple[str, Piece]]], dict[str, _Asked]]:
    """Returns every request's pieces with their names, and the different pieces by name."""
    of_request: dict[Arguments, list[tuple[str, Piece]]] = defaultdict(list)
    asked: dict[str, _Asked] = {}
    contexts: dict[str, list[int]] = defaultdict(list)  # of what is read, how many tokens were contexts
    for arguments, places in cuts.items():
        sequence = load(arguments)
        for piece in pieces(sequence, places):
            read, context = piece.read(sequence), piece.context_tokens(sequence)
            text = hashlib.sha256(np.ascontiguousarray(read).tobytes()).hexdigest()
            if context not in contexts[text]:
                contexts[text].append(context)
            name = f"{text}:{context}:{sequence.targets_T[piece.stop - 1]}"
            of_request[arguments].append((name, piece))
            asked.setdefault(name, _Asked(arguments, piece, len(read) + 1, contexts[text].index(context)))
    return of_request, asked


def _calls(asked: Named) -> Iterator[list[str]]:
    """Yields the names of pieces to score together, the longest first."""
    order = sorted(asked, key=lambda name: (asked[name].turn, -asked[name].tokens))
    for _, turn in itertools.groupby(order, key=lambda name: asked[name].turn):
        call: list[str] = []
        tokens = 0
        for name in turn:
            if call and tokens + asked[name].tokens > _TOKENS_A_CALL:
                yield call
                call, tokens = [], 0
            call.append(name)
            tokens += asked[name].tokens
        yield call


def _joined(scored: Sequence[tuple[Piece, Score]]) -> Answer:
    """Returns a request's answer, in which a piece's targets have equal shares of its sum."""
    counts = [piece.stop - piece.first for piece, _ in scored]
    shares = np.array([score.logprob for _, score in scored]) / counts
    greedy = np.array([score.greedy for _, score in scored])
    return np.repeat(shares, counts).astype(np.float32), np.repeat(greedy, counts)
