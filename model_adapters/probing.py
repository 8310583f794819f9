"""Request types of recall and span tasks: targets inside sequences, in batches of one length, and attention spans."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance

from sbeval.corpora import resolve_tokens
from sbeval.errors import UserError
from sbeval.model_adapters.answers import Give, answer_each_once, names_by_arguments
from sbeval.model_adapters.batching import run_in_batches
from sbeval.model_adapters.session import Session
from sbeval.scoring.non_finite import NonFiniteError
from sbeval.scoring.requests import (
    ATTENTION_SPAN,
    TARGET_LOGPROBS,
    AttentionSpanRequest,
    TargetLogprobs,
    TargetLogprobsRequest,
    TargetSequence,
    resolve_sequence,
)
from sbeval.scoring.spans import attention_spans


def target_logprobs(session: Session, requests: Sequence[Instance], *, quiet: bool) -> list[TargetLogprobs]:
    """Returns the log-probabilities of named targets; arguments are `TargetLogprobsRequest`."""
    names = names_by_arguments(requests)

    def run(todo: Sequence[TargetLogprobsRequest], give: Give[TargetLogprobsRequest, TargetLogprobs]) -> None:
        session.check_positions(max((request.inputs for request in todo), default=0))
        session.check_tokens((names[request], _load(request)[::2]) for request in todo)

        def run_batch(batch: Sequence[TargetLogprobsRequest]) -> None:
            started = time.perf_counter()
            loaded = [_load(request) for request in batch]
            with session.rope.hold(batch[0].inputs):
                try:
                    results = _score_batch(session, loaded)
                except NonFiniteError as error:
                    raise error.of(names[batch[error.row]]) from None
            session.meter.add(sum(request.inputs for request in batch), time.perf_counter() - started)
            for request, result in zip(batch, results, strict=True):
                give(request, result)

        with session.autocast():
            run_in_batches(
                sorted(todo, key=lambda request: -request.inputs),
                run_batch,
                length_tokens=lambda request: request.inputs,
                limits=session.own_batches,
            )

    return answer_each_once(session, requests, TARGET_LOGPROBS, TargetLogprobsRequest, run, quiet=quiet)


def attention_span(session: Session, requests: Sequence[Instance], *, quiet: bool) -> list[list[list[Any]]]:
    """Returns the effective spans of every layer and head; arguments are `AttentionSpanRequest`."""
    names = names_by_arguments(requests)
    if session.rope.extrapolation is not None:
        raise UserError(
            f"Expected a model that attends as it was trained to for attention spans, found extrapolation="
            f"{session.rope.extrapolation}: remove it from --model_args."
        )

    def run(todo: Sequence[AttentionSpanRequest], give: Give[AttentionSpanRequest, list[list[Any]]]) -> None:
        session.check_positions(max((request.context_length for request in todo), default=0))
        session.check_tokens((names[request], [resolve_tokens(request.key)]) for request in todo)
        for request in todo:
            started = time.perf_counter()
            tokens = torch.from_numpy(np.array(resolve_tokens(request.key), dtype=np.int64))[None].to(session.device)
            with session.autocast(), session.rope.hold(request.context_length):
                try:
                    rows = attention_spans(
                        session.scorer.model, tokens, request.queries, non_finite=session.scorer.non_finite
                    )
                except NonFiniteError as error:
                    raise error.of(names[request]) from None
            session.meter.add(request.context_length, time.perf_counter() - started)
            give(request, rows)

    return answer_each_once(session, requests, ATTENTION_SPAN, AttentionSpanRequest, run, quiet=quiet)


def _load(request: TargetLogprobsRequest) -> TargetSequence:
    sequence = resolve_sequence(request.key)
    if len(sequence.inputs_L) != request.inputs or not len(sequence.targets_T):
        raise ValueError(f"{request} does not fit the {len(sequence.inputs_L)} inputs its key names")
    return sequence


def _score_batch(session: Session, batch: Sequence[TargetSequence]) -> list[TargetLogprobs]:
    scores = session.scorer.score(
        torch.from_numpy(np.stack([sequence.inputs_L for sequence in batch])).to(session.device),
        torch.from_numpy(np.repeat(np.arange(len(batch)), [len(sequence.targets_T) for sequence in batch])),
        torch.from_numpy(np.concatenate([sequence.positions_T for sequence in batch])),
        torch.from_numpy(np.concatenate([sequence.targets_T for sequence in batch])),
    )
    ends = np.cumsum([len(sequence.targets_T) for sequence in batch])[:-1]
    logprobs, greedy = np.split(scores.logprobs.numpy(), ends), np.split(scores.greedy.numpy(), ends)
    return [TargetLogprobs(*pair) for pair in zip(logprobs, greedy, strict=True)]
