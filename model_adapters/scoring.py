"""Scoring: lm-eval's own request types as `hf` answers them, and the request type of our own tasks."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from sbeval.errors import UserError
from sbeval.model_adapters.options import AdapterOptions
from sbeval.model_adapters.response_cache import cached_response
from sbeval.model_adapters.rope import RequestRope
from sbeval.model_adapters.session import Meter
from sbeval.model_adapters.sharing import ON_CPU, ON_GPU, score_after_prefixes, share_windows, shared_prefixes
from sbeval.model_adapters.truncation import fit_contexts, record_cut
from sbeval.model_adapters.windows import RunScores, Window, requested_window, rolling_windows, score_windows, window
from sbeval.scoring.requests import TOKEN_LOGPROBS, TokenLogprobs, TokenLogprobsRequest
from sbeval.scoring.scorer import TokenScorer

GPU_BATCH_TOKENS = 65536
CPU_BATCH_TOKENS = 8192


class ScoringLM(HFLM):  # type: ignore[misc]
    """The request types that score tokens.

    Attributes:
        options: our own arguments.
        meter: tokens and seconds of the run so far.
        rope: holds RoPE's frequencies for each request.
        scorer: scores tokens with the model.
        learned_positions: how many positions the model has, None where they are not learned.
    """

    options: AdapterOptions
    meter: Meter
    rope: RequestRope
    scorer: TokenScorer
    learned_positions: int | None
    _scored: Sequence[Instance] = ()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation in nats, and whether it is the most probable one."""
        self._scored = requests
        try:
            scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
            return scores
        finally:
            self._scored = ()

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        if self.backend != "causal":
            scores: list[tuple[float, bool]] = super()._loglikelihood_tokens(
                requests, disable_tqdm=disable_tqdm, override_bs=override_bs
            )
            return scores
        names = [request.task_name for request in self._scored] or [None] * len(requests)
        pairs = [(context, continuation) for _, context, continuation in requests]
        contexts = fit_contexts(pairs, names, max_length=self.max_length, truncation=self.options.truncation)
        for instance, context in zip(self._scored, contexts, strict=False):
            record_cut(instance, context.cut_tokens)
        results: dict[int, tuple[float, bool]] = {}
        progress = self._progress(len(requests), "loglikelihood", disable_tqdm)

        def done(index: int, run: RunScores) -> None:
            results[index] = (run.total, run.greedy)
            if requests[index][0] is not None:
                self.cache_hook.add_partial("loglikelihood", requests[index][0], results[index])
            progress.update(1)

        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, context in enumerate(contexts):
            groups[context.inputs].append(index)
        members = list(groups.values())
        left = dict.fromkeys(range(len(members)))

        def window_done(group: int, scores: list[RunScores]) -> None:
            del left[group]
            for index, run in zip(members[group], scores, strict=True):
                done(index, run)

        targets = [[pairs[index][1] for index in indices] for indices in members]
        self._score_shared(list(groups), targets, window_done)
        whole = list(left)
        inputs = list(groups)
        windows = [window(inputs[group], targets[group]) for group in whole]
        self._score(windows, lambda number, scores: window_done(whole[number], scores))
        progress.close()
        return [results[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text in nats, in windows as `hf` cuts them."""
        if self.backend != "causal":
            values: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
            return values
        windows: list[Window] = []
        text_of: list[int] = []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            cuts = rolling_windows(tokens, lead_in=self.prefix_token_id, max_length=self.max_length)
            windows += cuts
            text_of += [index] * len(cuts)
        waiting = np.bincount(np.asarray(text_of, dtype=np.int64), minlength=len(requests))
        totals = [0.0] * len(requests)
        progress = self._progress(len(windows), "loglikelihood_rolling", disable_tqdm)

        def done(number: int, scores: list[RunScores]) -> None:
            index = text_of[number]
            totals[index] += scores[0].total
            waiting[index] -= 1
            if waiting[index] == 0:
                self.cache_hook.add_partial("loglikelihood_rolling", requests[index].args, totals[index])
            progress.update(1)

        self._score(windows, done)
        progress.close()
        return totals

    def token_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TokenLogprobs]:
        """Returns the log-probabilities of each window's last targets; arguments are `TokenLogprobsRequest`."""
        if self.backend != "causal":
            raise UserError("Expected a causal language model for token_logprobs, found an encoder-decoder model.")
        results: dict[tuple[Any, ...], TokenLogprobs] = {}
        todo: list[TokenLogprobsRequest] = []
        for arguments in dict.fromkeys(tuple(request.args) for request in requests):
            found = cached_response(self.cache_hook, TOKEN_LOGPROBS, arguments)
            if found is not None:
                results[arguments] = found
            else:
                todo.append(TokenLogprobsRequest(*arguments))
        progress = self._progress(len(todo), TOKEN_LOGPROBS, disable_tqdm)
        shared = share_windows(todo, nested=not self.rope.by_length)

        def done(index: int, scores: list[RunScores]) -> None:
            for request, part in shared[index].members:
                result = TokenLogprobs(scores[0].logprobs[part].copy())
                results[tuple(request)] = result
                self.cache_hook.add_partial(TOKEN_LOGPROBS, request, result)
                progress.update(1)

        self._score([requested_window(window.run) for window in shared], done, own=True)
        progress.close()
        return [results[tuple(request.args)] for request in requests]

    @property
    def _max_rows(self) -> int | None:
        return self.max_batch_size if self.batch_size == "auto" else int(self.batch_size)

    @property
    def _max_tokens(self) -> int | None:
        if self.options.max_batch_tokens is None and self.batch_size != "auto":
            return None
        return self._batch_tokens

    @property
    def _batch_tokens(self) -> int:
        default = CPU_BATCH_TOKENS if self.device.type == "cpu" else GPU_BATCH_TOKENS
        return self.options.max_batch_tokens or default

    def _score_shared(self, inputs: Sequence[tuple[int, ...]], targets: Sequence[list[list[int]]], done: Any) -> None:
        """Scores those windows that begin like others; `inputs` are their inputs, `targets` their runs of targets."""
        if self.rope.by_length:
            return
        scored_from = [len(own) - max(map(len, runs)) for own, runs in zip(inputs, targets, strict=True)]
        groups = shared_prefixes(inputs, scored_from, ON_CPU if self.device.type == "cpu" else ON_GPU)
        wanted = {index for group in groups for index in group.members}
        self._check_positions(max((len(inputs[index]) for index in wanted), default=0))
        with self._autocast():
            score_after_prefixes(
                groups,
                [window(own, runs).load() for own, runs in zip(inputs, targets, strict=True)] if groups else [],
                self.scorer,
                device=self.device,
                max_rows=self._max_rows,
                max_tokens=self._batch_tokens,
                hold=self.rope.hold,
                meter=self.meter,
                done=done,
            )

    def _score(self, windows: Sequence[Window], done: Any, *, own: bool = False) -> None:
        self._check_positions(max((window.length for window in windows), default=0))
        with self._autocast():
            score_windows(
                windows,
                self.scorer,
                device=self.device,
                max_rows=None if own else self._max_rows,
                max_tokens=self._batch_tokens if own else self._max_tokens,
                same_length=own or self.rope.by_length,
                hold=self.rope.hold,
                meter=self.meter,
                done=done,
                ahead=0 if self.device.type == "cpu" else 1,
            )

    def _autocast(self) -> torch.autocast:
        mixed = self.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=mixed, enabled=mixed is not None)

    def _check_positions(self, length: int) -> None:
        if self.learned_positions is not None and length > self.learned_positions:
            raise UserError(
                f"Expected at most {self.learned_positions} tokens, the number of this model's learned positions, "
                f"found a request of {length}: ask for shorter contexts or lower max_length in --model_args."
            )

    def _progress(self, total: int, name: str, disable: bool) -> "tqdm[Any]":
        return tqdm(total=total, disable=disable or self.rank != 0, desc=f"Running {name} requests")
