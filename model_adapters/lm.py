"""The lm-eval model `sb`: this project's models, and any Hugging Face causal language model in `hf`'s place."""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from sbeval.model_adapters.batching import run_in_batches
from sbeval.model_adapters.generation import answer_text, encode_prompt, pad_left
from sbeval.model_adapters.loading import fit_tokenizer, loading
from sbeval.model_adapters.meter import Meter
from sbeval.model_adapters.model_facts import choose_kernels, kernels_in_use, learned_positions, model_record
from sbeval.model_adapters.options import AdapterOptions
from sbeval.model_adapters.processes import find_processes
from sbeval.model_adapters.request_rope import RequestRope
from sbeval.model_adapters.response_cache import cached_response, stamp
from sbeval.model_adapters.run_settings import run_settings
from sbeval.model_adapters.shared_contexts import score_shared_contexts, shared_contexts
from sbeval.model_adapters.truncation import Prompt, fit_contexts, fit_prompts, record_cut
from sbeval.model_adapters.windows import RunScores, Window, requested_window, score_windows, window
from tqdm import tqdm

import sbeval.models  # noqa: F401  registers the family with transformers' Auto classes
from sbeval.errors import UserError
from sbeval.scoring import TokenScorer
from sbeval.token_logprobs import REQUEST_TYPE, TokenLogprobs, TokenLogprobsRequest

GPU_BATCH_TOKENS = 65536
CPU_BATCH_TOKENS = 8192


class StickBreakingLM(HFLM):  # type: ignore[misc]
    """lm-eval's `hf` with our scoring, and with the request type `token_logprobs` of our own tasks.

    Takes every argument of `hf`, and those of `AdapterOptions`. Encoder-decoder models run as they do in `hf`.
    """

    def __init__(self, pretrained: Any, **kwargs: Any) -> None:
        self.options = AdapterOptions.pop(kwargs)
        self.meter = Meter()
        self._scored: Sequence[Instance] = ()
        find_processes()
        super().__init__(pretrained, **kwargs)
        if hasattr(self, "accelerator"):  # hf does this only where one process sees several GPUs
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        if self.backend == "causal":
            fit_tokenizer(self.model, self.tokenizer)
            choose_kernels(self.model, self.options.kernels, self.options.skip_threshold)
            self.rope = RequestRope(self.model, self.options.rope_scaling, self.options.training_length)
            self.scorer = TokenScorer(self.model)
            self._learned_positions = learned_positions(self.model)

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        with loading(pretrained, "a model"):
            super()._get_config(pretrained, **kwargs)

    def _get_backend(self, config: Any, backend: Any = "default", **kwargs: Any) -> None:
        own = getattr(config, "model_type", None) == "sbeval" and backend == "default"
        super()._get_backend(config, backend="causal" if own else backend, **kwargs)

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **kwargs: Any) -> None:
        with loading(tokenizer or pretrained, "a tokenizer"):
            super()._create_tokenizer(pretrained, tokenizer, **kwargs)

    def _create_model(self, pretrained: str, **kwargs: Any) -> None:
        with loading(pretrained, "a model's weights"):
            super()._create_model(pretrained, **kwargs)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Takes lm-eval's response cache, new or made with the same settings."""
        if cache_hook.dbdict is not None and self.backend == "causal":
            stamp(cache_hook.dbdict, run_settings(self, self.options, self.rope.in_force))
        super().set_cache_hook(cache_hook)

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

        if not self.rope.by_length:
            with self._autocast():
                score_shared_contexts(
                    shared_contexts(pairs, [context.cut_tokens for context in contexts], self.device),
                    [continuation for _, continuation in pairs],
                    self.scorer,
                    device=self.device,
                    hold=self.rope.hold,
                    meter=self.meter,
                    done=done,
                )
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, context in enumerate(contexts):
            if index not in results:
                groups[context.inputs].append(index)
        members = list(groups.values())

        def window_done(group: int, scores: list[RunScores]) -> None:
            for index, run in zip(members[group], scores, strict=True):
                done(index, run)

        windows = [window(inputs, [pairs[index][1] for index in indices]) for inputs, indices in groups.items()]
        self._score(windows, window_done)
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
            cuts = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, targets in map(make_disjoint_window, cuts):
                windows.append(window((context + targets)[:-1], [targets]))
                text_of.append(index)
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
            found = cached_response(self.cache_hook, REQUEST_TYPE, arguments)
            if found is not None:
                results[arguments] = found
            else:
                todo.append(TokenLogprobsRequest(*arguments))
        progress = self._progress(len(todo), REQUEST_TYPE, disable_tqdm)

        def done(index: int, scores: list[RunScores]) -> None:
            result = TokenLogprobs(scores[0].logprobs)
            results[tuple(todo[index])] = result
            self.cache_hook.add_partial(REQUEST_TYPE, todo[index], result)
            progress.update(1)

        self._score([requested_window(request) for request in todo], done, own=True)
        progress.close()
        return [results[tuple(request.args)] for request in requests]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the continuation of each prompt up to its first stop sequence."""
        if self.backend != "causal":
            texts: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
            return texts
        settings = [normalize_gen_kwargs(request.args[1], self.max_gen_toks) for request in requests]
        quiet = disable_tqdm or self.rank != 0
        prompts = fit_prompts(
            [self._encode_prompt(r.args[0]) for r in tqdm(requests, desc="Tokenizing prompts", disable=quiet)],
            [setting["max_gen_toks"] for setting in settings],
            [request.task_name for request in requests],
            max_length=self.max_length,
            truncation=self.options.truncation,
        )
        lengths = [len(prompt.tokens) + prompt.budget_tokens for prompt in prompts]
        self._check_positions(max(lengths, default=0))
        groups: dict[str, list[int]] = defaultdict(list)
        for index, setting in enumerate(settings):
            groups[json.dumps(setting, sort_keys=True, default=str)].append(index)
        results: dict[int, str] = {}
        progress = self._progress(len(requests), "generate_until", disable_tqdm)

        def run(batch: Sequence[int]) -> None:
            started = time.perf_counter()
            with self.rope.hold(lengths[batch[0]]):
                texts = self._generate([prompts[index] for index in batch], settings[batch[0]])
            self.meter.add(sum(len(prompts[index].tokens) for index in batch), time.perf_counter() - started)
            for index, text in zip(batch, texts, strict=True):
                results[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args[:2], text)
                record_cut(requests[index], prompts[index].cut_tokens)
                progress.update(1)

        for indices in groups.values():
            run_in_batches(
                sorted(indices, key=lambda index: -lengths[index]),
                run,
                length_tokens=lambda index: lengths[index],
                max_rows=self._max_rows,
                max_tokens=self._max_tokens,
                same_length=self.rope.by_length,
            )
        progress.close()
        return [results[index] for index in range(len(requests))]

    def _encode_prompt(self, text: str) -> list[int]:
        return encode_prompt(
            self.tokenizer, text, add_bos_token=self.add_bos_token, prefix_token_id=self.prefix_token_id
        )

    def _generate(self, prompts: Sequence[Prompt], setting: Any) -> list[str]:
        kwargs = dict(setting)
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        stop = handle_stop_sequences(list(kwargs.pop("until")), eos=eos)
        budget = kwargs.pop("max_gen_toks")
        input_ids, mask = pad_left(prompts, self.tokenizer.pad_token_id, self.device)
        output = self._model_generate(
            context=input_ids,
            attention_mask=mask,
            stop=stop,
            max_length=kwargs.pop("max_length", input_ids.shape[1] + budget),
            **kwargs,
        )
        continuations = output[:, input_ids.shape[1] :].tolist()
        return [answer_text(self.tokenizer, tokens, stop, self.think_end_token) for tokens in continuations]

    def get_model_info(self) -> dict[str, Any]:
        """Returns `hf`'s facts, and this run's `ModelRecord` under "sbeval"."""
        record = model_record(
            self.model,
            pretrained=self.pretrained if isinstance(self.pretrained, str) else None,
            training_length=self.options.training_length,
            kernels=kernels_in_use(self.model, self.options.kernels, self.device),
            rope_scaling=self.rope.in_force if self.backend == "causal" else None,
            skip_threshold=self.options.skip_threshold,
            max_length=self.max_length,
            device=self.device,
            tokens_per_second=self.meter.tokens_per_second,
        )
        return {**super().get_model_info(), "sbeval": record.to_json()}

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
            )

    def _autocast(self) -> torch.autocast:
        mixed = self.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=mixed, enabled=mixed is not None)

    def _check_positions(self, length: int) -> None:
        if self._learned_positions is not None and length > self._learned_positions:
            raise UserError(
                f"Expected at most {self._learned_positions} tokens, the number of this model's learned positions, "
                f"found a request of {length}: ask for shorter contexts or lower max_length in --model_args."
            )

    def _progress(self, total: int, name: str, disable: bool) -> "tqdm[Any]":
        return tqdm(total=total, disable=disable or self.rank != 0, desc=f"Running {name} requests")
