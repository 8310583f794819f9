"""`OpeningLM`: a subclass of lm-eval's `hf` that loads models as this project does.

`hf` loads a model in its constructor, which calls the methods `_get_config`, `_get_backend`, `_create_tokenizer` and
`_create_model` in this order. All four are overridden here. `_get_config` reads config.json, which the other methods
then use. If config.json names a format that transformers does not know, `hf` gets an empty configuration until
`_create_model` loads the weights.
"""

import contextlib
import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.models.huggingface import HFLM
from transformers import PretrainedConfig

import sbeval.models  # noqa: F401  registers the family with transformers' Auto classes
from sbeval.checkpoints import load as checkpoints
from sbeval.checkpoints.facts import checkpoint_format, refuse_adapter, text_config
from sbeval.checkpoints.files import check_weights
from sbeval.checkpoints.unread import UnreadTensors, settle_unread_files
from sbeval.checkpoints.values import check_generation
from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.model_adapters.open.adapters import whole_adapter
from sbeval.model_adapters.open.arguments import check_shared_arguments
from sbeval.model_adapters.open.errors import explaining_load_errors
from sbeval.model_adapters.open.opened import Opened
from sbeval.model_adapters.open.processes import join_processes, meeting
from sbeval.model_adapters.open.tensor_plan import check_tensor_plan
from sbeval.model_adapters.open.tokenizer import (
    added_to_texts,
    check_tokenizer,
    fit_tokenizer,
    is_as_saved,
    log_added_tokens,
    prefix_token_id,
    thinking_end,
)
from sbeval.model_adapters.open.weights import (
    check_kv_expand,
    log_format,
    refuse_transformers_arguments,
    tied_as_it_is,
    warn_of_weights,
)
from sbeval.model_adapters.options import AdapterOptions
from sbeval.processes import ranks
from sbeval.scoring.non_finite import record_nulls

_OF_CAUSAL_MODELS = ("non_finite", "extrapolation", "cache", "thinking_tokens", "template_suffix")


@dataclasses.dataclass(kw_only=True, slots=True)
class _Opening:
    """State that the overridden methods share while the constructor of `hf` calls them."""

    options: AdapterOptions
    arguments: dict[str, Any]
    detected_format: checkpoints.FoundFormat = (None, {})
    loaded: checkpoints.LoadedCheckpoint | None = None
    unread: UnreadTensors = dataclasses.field(default_factory=UnreadTensors)
    ties_weights: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    def leave_unread(self, unread: UnreadTensors) -> None:
        self.unread |= unread


class OpeningLM(HFLM):  # type: ignore[misc]
    """lm-eval's `hf`, extended by checkpoint formats that transformers does not know and by one-sentence errors."""

    AUTO_MODEL_CLASS: Any = None
    chat_template_args: dict[str, Any]
    think_end_token: str | int | None

    def open(self, pretrained: Any, **kwargs: Any) -> Opened:
        """Loads a model and its tokenizer through the constructor of `hf`, and checks that they belong together.

        Args:
            pretrained: a folder, a hub id, or a model in memory.
            kwargs: arguments of `hf` and of `AdapterOptions`.

        Raises:
            UserError: an argument is wrong, or the model, its adapter or its tokenizer cannot be loaded.
        """
        options = AdapterOptions.pop(kwargs)
        check_shared_arguments(kwargs, options)
        opening = self._opening = _Opening(options=options, arguments=dict(kwargs))
        join_processes(shares_model=kwargs.get("tp_plan") is not None)
        if isinstance(pretrained, str) and pretrained.startswith("~"):
            pretrained = str(local_path(pretrained))
        with meeting(), opening.ties_weights:
            if isinstance(pretrained, torch.nn.Module):
                opening.ties_weights.enter_context(tied_as_it_is(pretrained))
            super().__init__(pretrained, **kwargs)
        if hasattr(self, "accelerator"):  # `hf` sets rank and world size only if one process sees several GPUs
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        if options.thinking_tokens is not None:
            self.chat_template_args = {**self.chat_template_args, "enable_thinking": True}
        source = pretrained if isinstance(pretrained, str) else None
        self._check_options(options)
        if self.backend == "causal":
            self._check_model_and_tokenizer(source)
        if options.thinking_tokens is not None:
            self.think_end_token = thinking_end(self.tokenizer, self.think_end_token)
        loaded = opening.loaded
        opened = Opened(
            model=self.model,
            tokenizer=self.tokenizer,
            source=source,
            format=loaded.format if loaded else checkpoint_format(text_config(getattr(self.model, "config", None))),
            attention=loaded.attention if loaded else None,
            folder=loaded.folder if loaded and loaded.folder else Path(source) if source else None,
            unread=opening.unread,
            options=options,
            arguments=opening.arguments,
            causal=self.backend == "causal",
            device=self.device,
            mixed_precision_dtype=self.mixed_precision_dtype,
            max_length=self.max_length,
            max_gen_toks=self.max_gen_toks,
            batch_size=self.batch_size,
            max_batch_size=self.max_batch_size,
            add_bos_token=self.add_bos_token,
            passed_prefix_token_id=self.custom_prefix_token_id,
            think_end_token=self.think_end_token,
            rank=self.rank,
            world_size=self.world_size,
        )
        if opened.causal and (added := added_to_texts(opened)):
            log_added_tokens(added)
        return opened

    def _check_options(self, options: AdapterOptions) -> None:
        """Refuses options that do not work with encoder-decoder models, and applies `non_finite=null` to lm-eval."""
        for name in _OF_CAUSAL_MODELS if self.backend != "causal" else ():
            if (value := getattr(options, name)) != AdapterOptions.model_fields[name].default:
                raise UserError(
                    f"{name}={value} does not work with an encoder-decoder model: remove {name} from --model_args."
                )
        if options.non_finite == "null":
            record_nulls(Task)
            record_nulls(ConfigurableTask)

    def _check_model_and_tokenizer(self, source: str | None) -> None:
        fit_tokenizer(self.model, self.tokenizer)
        folder = Path(source) if source is not None else None
        saved_config = self._opening.detected_format[1] if folder is not None and folder.is_dir() else {}
        as_saved = is_as_saved(self._opening.arguments)
        check_tokenizer(self.model, self.tokenizer, folder=folder, saved_config=saved_config, as_saved=as_saved)
        warn_of_weights(self.model)
        check_generation(self.model.generation_config, self.model.get_input_embeddings().weight.shape[0])

    @property
    def prefix_token_id(self) -> int:
        """The token id before the first token of a text: the one that the user passed, else BOS or EOS."""
        return prefix_token_id(self.tokenizer, self.custom_prefix_token_id)

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        opening = self._opening
        subfolder = kwargs.get("subfolder") or ""
        with explaining_load_errors(pretrained, "a model", **self._requests()):
            if isinstance(pretrained, str):
                refuse_adapter(local_path(pretrained) / subfolder)
            if not kwargs.get("gguf_file") and not subfolder:
                opening.detected_format = checkpoints.released_format(pretrained, kwargs["revision"])
                check_kv_expand(pretrained, opening.detected_format[0], opening.options.kv_expand)
            released, saved_config = opening.detected_format
            if released is not None:
                self._config = PretrainedConfig()  # a placeholder: `_create_model` sets the real one with the weights
                return
            if (weights := check_weights(local_path(pretrained) / subfolder, saved_config)) is not None:
                opening.leave_unread(settle_unread_files(weights, opening.options.allow_unread or ()))
            checkpoints.register_fla_models()
            super()._get_config(pretrained, **kwargs)
            checkpoints.check_quantisation(self._config, local_path(pretrained) / subfolder)
        if (plan := opening.arguments.get("tp_plan")) is not None:
            check_tensor_plan(self._config, plan)
        log_format(pretrained, checkpoint_format(self._config))

    def _get_backend(self, config: Any, backend: Any = "default", **kwargs: Any) -> None:
        causal = self._opening.detected_format[0] is not None or getattr(config, "model_type", None) == "sbeval"
        super()._get_backend(config, backend="causal" if causal and backend == "default" else backend, **kwargs)

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **kwargs: Any) -> None:
        argument = "tokenizer" if tokenizer else "pretrained"
        requests = self._requests() if not tokenizer else {}
        with explaining_load_errors(tokenizer or pretrained, "a tokenizer", argument=argument, **requests):
            super()._create_tokenizer(pretrained, tokenizer, **kwargs)

    def _create_model(self, pretrained: str, **kwargs: Any) -> None:
        opening, auto_class = self._opening, self.AUTO_MODEL_CLASS
        checked: dict[str, Any] = {"allow_unread": opening.options.allow_unread or (), "report": opening.leave_unread}
        with (
            explaining_load_errors(pretrained, "a model's weights", **self._requests()),
            whole_adapter(kwargs.get("peft"), **checked),
        ):
            if opening.detected_format[0] is None:
                load: Any = functools.partial(checkpoints.load_whole, auto_class, **checked)
            else:
                model = self._load_released(pretrained, kwargs)
                load = lambda *_, **__: model  # noqa: E731  the model is loaded, with its dtype, device and revision
            # `_create_model` of `hf` calls `AUTO_MODEL_CLASS.from_pretrained`, and then adds a PEFT adapter
            self.AUTO_MODEL_CLASS = SimpleNamespace(from_pretrained=load)
            super()._create_model(pretrained, **kwargs)
        opening.ties_weights.enter_context(tied_as_it_is(self._model))
        self.AUTO_MODEL_CLASS = auto_class

    def _load_released(self, pretrained: str, arguments: dict[str, Any]) -> Any:
        """Loads a checkpoint in a format that transformers does not know, and returns the model."""
        opening = self._opening
        opening.loaded = loaded = checkpoints.load_checkpoint(
            pretrained,
            dtype="auto" if arguments["dtype"] is None else arguments["dtype"],
            device=self.device,
            kv_expand=opening.options.kv_expand,
            trust_remote_code=bool(arguments["trust_remote_code"]),
            revision=arguments["revision"],
            detected_format=opening.detected_format,
            allow_unread=opening.options.allow_unread or (),
        )
        opening.leave_unread(loaded.unread)
        self._config = loaded.model.config
        log_format(pretrained, loaded.format)
        refuse_transformers_arguments(loaded.format, arguments, convertible=loaded.extendable)
        return loaded.model

    def _requests(self) -> dict[str, Any]:
        """Returns the arguments and the contents of config.json as keyword arguments of `explaining_load_errors`."""
        return {"given": self._opening.arguments, "config": self._opening.detected_format[1]}

    all_gather = ranks.waiting()(HFLM.all_gather)
    gather_object = ranks.waiting()(HFLM.gather_object)
    barrier = ranks.waiting()(HFLM.barrier)
