"""Request types of the recall and span tasks: answers inside a sequence, and how far attention reaches."""

import time
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance

from sbeval.attention_span import attention_spans
from sbeval.corpora import resolve_tokens
from sbeval.errors import UserError
from sbeval.model_adapters.response_cache import cached_response
from sbeval.model_adapters.scoring_lm import ScoringLM
from sbeval.model_adapters.targets import score_targets
from sbeval.target_logprobs import TARGET_LOGPROBS, TargetLogprobs, TargetLogprobsRequest
from sbeval.token_logprobs import ATTENTION_SPAN, AttentionSpanRequest


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
