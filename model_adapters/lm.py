"""The lm-eval model `sb`: this project's models, and any Hugging Face causal language model in `hf`'s place."""

import os
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import CacheHook

import sbeval.models  # noqa: F401  registers the family with transformers' Auto classes
from sbeval.checkpoints import LoadedCheckpoint, check_shards, register_fla_models
from sbeval.model_adapters.generation import GeneratingLM
from sbeval.model_adapters.loading import (
    InPlaceOfAutoClass,
    WholeFrom,
    find_released,
    fit_tokenizer,
    loading,
    refuse_transformers_arguments,
    say_format,
)
from sbeval.model_adapters.options import AdapterOptions, check_shared_arguments
from sbeval.model_adapters.record import choose_kernels, kernels_in_use, model_record, run_settings
from sbeval.model_adapters.response_cache import stamp
from sbeval.model_adapters.rope import RequestRope
from sbeval.model_adapters.session import Meter
from sbeval.model_adapters.speed.faster import make_faster
from sbeval.models.learned_positions import learned_positions
from sbeval.scoring.scorer import TokenScorer


class StickBreakingLM(GeneratingLM):
    """lm-eval's `hf` with our scoring and generation, and with the request types of our own tasks.

    Takes every argument of `hf`, and those of `AdapterOptions`. Encoder-decoder models run as they do in `hf`.
    """

    AUTO_MODEL_CLASS: Any = None
    loaded: LoadedCheckpoint | None = None  # where the format is one that transformers does not know

    def __init__(self, pretrained: Any, **kwargs: Any) -> None:
        self.options = AdapterOptions.pop(kwargs)
        check_shared_arguments(kwargs)
        self._dtype = kwargs.get("dtype", "auto")
        self._arguments = dict(kwargs)
        self.meter = Meter()
        self.skip_threshold: float | None = None
        find_processes()
        super().__init__(pretrained, **kwargs)
        if hasattr(self, "accelerator"):  # hf does this only where one process sees several GPUs
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        if self.backend == "causal":
            fit_tokenizer(self.model, self.tokenizer)
            self.skip_threshold = choose_kernels(self.model, self.options.kernels, self.options.skip_threshold)
            if self.device.type == "cuda":
                make_faster(self.model)
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
                check_shards(Path(pretrained).expanduser() / kwargs.get("subfolder", ""))
                register_fla_models()
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
        own_class = self.AUTO_MODEL_CLASS
        self.AUTO_MODEL_CLASS = WholeFrom(own_class) if self.loaded is None else InPlaceOfAutoClass(self.loaded)
        with loading(pretrained, "a model's weights"):
            super()._create_model(pretrained, **kwargs)
        self.AUTO_MODEL_CLASS = own_class

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Takes lm-eval's response cache, new or made with the same settings."""
        if cache_hook.dbdict is not None and self.backend == "causal":
            stamp(cache_hook.dbdict, run_settings(self, self.options, self.rope.in_force, self._arguments))
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Returns `hf`'s facts, and this run's `ModelRecord` under "sbeval"."""
        record = model_record(
            self.model,
            loaded=self.loaded,
            pretrained=self.pretrained if isinstance(self.pretrained, str) else None,
            training_length=self.options.training_length,
            kernels=kernels_in_use(self.model, self.options.kernels, self.device),
            rope_scaling=self.rope.in_force if self.backend == "causal" else None,
            skip_threshold=self.skip_threshold,
            max_length=self.max_length,
            device=self.device,
            tokens_per_second=self.meter.tokens_per_second,
        )
        return {**super().get_model_info(), "sbeval": record.to_json()}


def find_processes() -> None:
    """Makes accelerate join processes launched together on a machine without an accelerator.

    Left to itself it takes each of them for the only one there, and every process evaluates everything.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
