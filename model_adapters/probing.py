"""Request types of recall and span tasks: targets inside sequences, in batches of one length, and attention spans."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance

from sbeval.corpora import resolve_tokens
from sbeval.errors import UserError
from sbeval.model_adapters.batching import run_in_batches
from sbeval.model_adapters.response_cache import cached_response
from sbeval.model_adapters.scoring import ScoringLM
from sbeval.model_adapters.session import Meter
from sbeval.scoring.requests import (
    ATTENTION_SPAN,
    TARGET_LOGPROBS,
    AttentionSpanRequest,
    TargetLogprobs,
    TargetLogprobsRequest,
    TargetSequence,
    resolve_sequence,
)
from sbeval.scoring.scorer import TokenScorer
from sbeval.scoring.spans import attention_spans


class ProbingLM(ScoringLM):
    """The request types that look inside a sequence or a model."""

    def target_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TargetLogprobs]:
        """Returns the log-probabilities of named targets; arguments are `TargetLogprobsRequest`."""
        self._refuse_encoder_decoder(TARGET_LOGPROBS)
        results: dict[tuple[Any, ...], TargetLogprobs] = {}
        todo: list[TargetLogprobsRequest] = []
        for arguments in dict.fromkeys(tuple(request.args) for request in requests):
            found = cached_response(self.cache_hook, TARGET_LOGPROBS, arguments)
            if found is not None:
                results[arguments] = found
            else:
                todo.append(TargetLogprobsRequest(*arguments))
        progress = self._progress(len(todo), TARGET_LOGPROBS, disable_tqdm)

        def done(index: int, result: TargetLogprobs) -> None:
            results[tuple(todo[index])] = result
            self.cache_hook.add_partial(TARGET_LOGPROBS, todo[index], result)
            progress.update(1)

        self._check_positions(max((request.inputs for request in todo), default=0))
        with self._autocast():
            score_targets(
                todo,
                self.scorer,
                device=self.device,
                max_tokens=self._batch_tokens,
                hold=self.rope.hold,
                meter=self.meter,
                done=done,
            )
        progress.close()
        return [results[tuple(request.args)] for request in requests]

    def attention_span(self, requests: list[Instance], disable_tqdm: bool = False) -> list[list[list[Any]]]:
        """Returns the effective spans of every layer and head; arguments are `AttentionSpanRequest`."""
        self._refuse_encoder_decoder(ATTENTION_SPAN)
        results: dict[tuple[Any, ...], list[list[Any]]] = {}
        todo: list[AttentionSpanRequest] = []
        for arguments in dict.fromkeys(tuple(request.args) for request in requests):
            found = cached_response(self.cache_hook, ATTENTION_SPAN, arguments)
            if found is not None:
                results[arguments] = found
            else:
                todo.append(AttentionSpanRequest(*arguments))
        self._check_positions(max((request.context_length for request in todo), default=0))
        progress = self._progress(len(todo), ATTENTION_SPAN, disable_tqdm)
        for request in todo:
            started = time.perf_counter()
            tokens = torch.from_numpy(np.array(resolve_tokens(request.key), dtype=np.int64))[None].to(self.device)
            with self._autocast(), self.rope.hold(request.context_length):
                rows = attention_spans(self.model, tokens, request.queries)
            self.meter.add(request.context_length, time.perf_counter() - started)
            results[tuple(request)] = rows
            self.cache_hook.add_partial(ATTENTION_SPAN, request, rows)
            progress.update(1)
        progress.close()
        return [results[tuple(request.args)] for request in requests]

    def _refuse_encoder_decoder(self, request_type: str) -> None:
        if self.backend != "causal":
            raise UserError(f"Expected a causal language model for {request_type}, found an encoder-decoder model.")


def score_targets(
    requests: Sequence[TargetLogprobsRequest],
    scorer: TokenScorer,
    *,
    device: torch.device,
    max_tokens: int,
    hold: Callable[[int], AbstractContextManager[None]],
    meter: Meter,
    done: Callable[[int, TargetLogprobs], None],
) -> None:
    """Scores every request, longest first, and calls `done(index, result)` as each batch finishes.

    A batch holds requests of one length and runs inside `hold(length)`.
    """

    def run(batch: Sequence[int]) -> None:
        started = time.perf_counter()
        loaded = [_load(requests[index]) for index in batch]
        with hold(requests[batch[0]].inputs):
            results = _score_batch(loaded, scorer, device)
        meter.add(sum(requests[index].inputs for index in batch), time.perf_counter() - started)
        for index, result in zip(batch, results, strict=True):
            done(index, result)

    run_in_batches(
        sorted(range(len(requests)), key=lambda index: -requests[index].inputs),
        run,
        length_tokens=lambda index: requests[index].inputs,
        max_rows=None,
        max_tokens=max_tokens,
        same_length=True,
    )


def _load(request: TargetLogprobsRequest) -> TargetSequence:
    sequence = resolve_sequence(request.key)
    if len(sequence.inputs_L) != request.inputs or not len(sequence.targets_T):
        raise ValueError(f"{request} does not fit the {len(sequence.inputs_L)} inputs its key names")
    return sequence


def _score_batch(batch: Sequence[TargetSequence], scorer: TokenScorer, device: torch.device) -> list[TargetLogprobs]:
    scores = scorer.score(
        torch.from_numpy(np.stack([sequence.inputs_L for sequence in batch])).to(device),
        torch.from_numpy(np.repeat(np.arange(len(batch)), [len(sequence.targets_T) for sequence in batch])),
        torch.from_numpy(np.concatenate([sequence.positions_T for sequence in batch])),
        torch.from_numpy(np.concatenate([sequence.targets_T for sequence in batch])),
    )
    ends = np.cumsum([len(sequence.targets_T) for sequence in batch])[:-1]
    logprobs, greedy = np.split(scores.logprobs.numpy(), ends), np.split(scores.greedy.numpy(), ends)
    return [TargetLogprobs(*pair) for pair in zip(logprobs, greedy, strict=True)]
