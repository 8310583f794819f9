"""The lm-eval model `sb`: this project's models, and any Hugging Face causal language model in `hf`'s place."""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from tqdm import tqdm

import sbeval.models  # noqa: F401  registers the family with transformers' Auto classes
from sbeval.checkpoints import LoadedCheckpoint
from sbeval.learned_positions import learned_positions
from sbeval.model_adapters.batching import run_in_batches
from sbeval.model_adapters.generation import answer_text, encode_prompt, pad_left
from sbeval.model_adapters.loading import fit_tokenizer, loading
from sbeval.model_adapters.meter import Meter
from sbeval.model_adapters.model_facts import choose_kernels, kernels_in_use, model_record
from sbeval.model_adapters.options import AdapterOptions
from sbeval.model_adapters.probing_lm import ProbingLM
from sbeval.model_adapters.processes import find_processes
from sbeval.model_adapters.released import (
    InPlaceOfAutoClass,
    find_released,
    refuse_transformers_arguments,
    say_format,
)
from sbeval.model_adapters.request_rope import RequestRope
from sbeval.model_adapters.response_cache import stamp
from sbeval.model_adapters.run_settings import run_settings
from sbeval.model_adapters.truncation import Prompt, fit_prompts, record_cut
from sbeval.scoring import TokenScorer


class StickBreakingLM(ProbingLM):
    """lm-eval's `hf` with our scoring, and with the request type `token_logprobs` of our own tasks.

    Takes every argument of `hf`, and those of `AdapterOptions`. Encoder-decoder models run as they do in `hf`.
    """

    loaded: LoadedCheckpoint | None = None  # where the format is one that transformers does not know

    def __init__(self, pretrained: Any, **kwargs: Any) -> None:
        self.options = AdapterOptions.pop(kwargs)
        self._dtype = kwargs.get("dtype", "auto")
        self.meter = Meter()
        find_processes()
        super().__init__(pretrained, **kwargs)
        if hasattr(self, "accelerator"):  # hf does this only where one process sees several GPUs
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        if self.backend == "causal":
            fit_tokenizer(self.model, self.tokenizer)
            choose_kernels(self.model, self.options.kernels, self.options.skip_threshold)
            self.rope = RequestRope(self.model, self.options.rope_scaling, self.options.training_length)
            self.scorer = TokenScorer(self.model)
            self.learned_positions = learned_positions(self.model)

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        with loading(pretrained, "a model"):
            if not kwargs.get("gguf_file") and not kwargs.get("subfolder"):
                self.loaded = find_released(
                    pretrained,
                    revision=kwargs["revision"],
                    dtype=self._dtype,
                    device=self.device,
                    kv_expand=self.options.kv_expand,
                    trust_remote_code=bool(kwargs.get("trust_remote_code")),
                )
            if self.loaded is None:
                super()._get_config(pretrained, **kwargs)
            else:
                self._config = self.loaded.model.config
        say_format(pretrained, self._config, self.loaded)

    def _get_backend(self, config: Any, backend: Any = "default", **kwargs: Any) -> None:
        own = self.loaded is not None or getattr(config, "model_type", None) == "sbeval"
        super()._get_backend(config, backend="causal" if own and backend == "default" else backend, **kwargs)

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **kwargs: Any) -> None:
        with loading(tokenizer or pretrained, "a tokenizer"):
            super()._create_tokenizer(pretrained, tokenizer, **kwargs)

    def _create_model(self, pretrained: str, **kwargs: Any) -> None:
        if self.loaded is not None:
            refuse_transformers_arguments(self.loaded.format, kwargs)
            self.AUTO_MODEL_CLASS = InPlaceOfAutoClass(self.loaded)
        with loading(pretrained, "a model's weights"):
            super()._create_model(pretrained, **kwargs)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Takes lm-eval's response cache, new or made with the same settings."""
        if cache_hook.dbdict is not None and self.backend == "causal":
            stamp(cache_hook.dbdict, run_settings(self, self.options, self.rope.in_force))
        super().set_cache_hook(cache_hook)

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
            loaded=self.loaded,
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
