"""The lm-eval model `sb`: this project's models, and any Hugging Face causal language model in `hf`'s place."""

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import PretrainedConfig

import sbeval.models  # noqa: F401  registers the family with transformers' Auto classes
from sbeval.checkpoints import load as checkpoints
from sbeval.checkpoints.facts import checkpoint_format, refuse_adapter
from sbeval.checkpoints.files import check_weights
from sbeval.checkpoints.unread import UnreadTensors
from sbeval.checkpoints.values import check_generation
from sbeval.corpora.tokenizers import special_beginnings
from sbeval.errors import UserError, first_line, log_visibly
from sbeval.hub_names import local_path
from sbeval.model_adapters import generation, loading, scoring
from sbeval.model_adapters.answers import check_scores
from sbeval.model_adapters.batching import share_passes
from sbeval.model_adapters.decoding.texts import added_by_tokenizer, encode_texts
from sbeval.model_adapters.options import AdapterOptions, check_shared_arguments
from sbeval.model_adapters.prepare.change import Setting
from sbeval.model_adapters.prepare.prepared import Prepared, prepare
from sbeval.model_adapters.record import model_record, run_settings, stamp
from sbeval.model_adapters.self_test.testing import tested
from sbeval.model_adapters.session import Session
from sbeval.processes import ranks
from sbeval.scoring.non_finite import FiniteWatch, record_nulls
from sbeval.scoring.requests import ATTENTION_SPAN, TARGET_LOGPROBS, TOKEN_LOGPROBS, TargetLogprobs, TokenLogprobs


class StickBreakingLM(HFLM):  # type: ignore[misc]
    """lm-eval's `hf` with our scoring and generation, and with the request types of our own tasks.

    Takes every argument of `hf`, and those of `AdapterOptions`. Encoder-decoder models run as they do in `hf`.

    Attributes:
        arguments: those of `hf` as they were given, such as a quantisation or a `gguf_file`.
        loaded: the checkpoint, where its format is one that transformers does not know.
        unread: tensors of the checkpoint and of its adapter that the model does not read.
        prepared: the changes to the loaded model that stayed, and notes on those that were undone.
        skip_threshold: the one in force, None where every key is visited.
        session: what every request needs, None for an encoder-decoder model.
    """

    AUTO_MODEL_CLASS: Any = None

    def __init__(self, pretrained: Any, **kwargs: Any) -> None:
        self.options = AdapterOptions.pop(kwargs)
        check_shared_arguments(kwargs, self.options)
        self.arguments = dict(kwargs)
        self.loaded: checkpoints.LoadedCheckpoint | None = None
        self.unread = UnreadTensors()
        self._format: checkpoints.FoundFormat = (None, {})
        self.prepared: Prepared
        self.skip_threshold: float | None = None
        self.session: Session | None = None
        self._encoded: dict[str, list[int]] = {}
        log_visibly()
        ranks.find_processes()
        share_passes(kwargs.get("tp_plan") is not None and ranks.several())
        ranks.watch()
        if ranks.is_first_process():
            loading.warn_of_versions()
        elif kwargs.get("tp_plan") is not None:
            logging.disable(logging.INFO)  # every process has the same to tell
        if isinstance(pretrained, str) and pretrained.startswith("~"):
            pretrained = str(local_path(pretrained))
        try:
            with contextlib.ExitStack() as self._tied:
                if isinstance(pretrained, torch.nn.Module):
                    self._tied.enter_context(loading.tied_as_it_is(pretrained))
                super().__init__(pretrained, **kwargs)
        except torch.distributed.DistNetworkError as error:
            place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            expected = f"Expected {os.environ.get('WORLD_SIZE', '1')} processes to meet at {place}"
            remedy = "choose another port (--master-port of torchrun, --main_process_port of accelerate)"
            raise UserError(f"{expected}, but {first_line(error)}: {remedy}.") from error
        if hasattr(self, "accelerator"):  # hf does this only where one process sees several GPUs
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes
        for name, usual in (
            *(("non_finite", "error"), ("extrapolation", None)),
            *(("thinking_tokens", None), ("template_suffix", "drop")),
        ):
            if self.backend != "causal" and (asked := getattr(self.options, name)) != usual:
                raise UserError(
                    f"Expected no {name} for an encoder-decoder model, found {asked}: remove it from --model_args."
                )
        if self.options.non_finite == "null":
            record_nulls(Task)
            record_nulls(ConfigurableTask)
        if self.backend == "causal":
            loading.fit_tokenizer(self.model, self.tokenizer)
            in_a_folder = isinstance(pretrained, str) and Path(pretrained).is_dir()
            loading.check_tokenizer(self, self._format[1] if in_a_folder else {})
            if added := added_by_tokenizer(self):
                loading.say_added_tokens(added)
            loading.warn_of_weights(self.model)
            check_generation(self.model.generation_config, self.model.get_input_embeddings().weight.shape[0])
        self.prepared = prepare(self.model, self.tokenizer, Setting.of(self))
        if self.backend == "causal":
            self.skip_threshold = self.prepared.skip_threshold
            self.session = Session.of(self, self.options)
            self.session = tested(self.session, self)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text's first one: the one given, else the tokenizer's BOS or EOS."""
        token: int | None = super().prefix_token_id
        if token is None:
            expected = "Expected a tokenizer with a BOS or EOS token to put before a text's first token"
            raise UserError(f"{expected}, found neither: pass prefix_token_id=... in --model_args.")
        return token

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation in nats, and whether it is the most probable one."""
        if self.session is not None:
            self.session.self_test.check("scoring")
            self._encode_together([request.args for request in requests], quiet=disable_tqdm or self.session.quiet)
        try:
            found = super().loglikelihood(requests, disable_tqdm=disable_tqdm)  # ends in `_loglikelihood_tokens`
        finally:
            self._encoded = {}
        if self.session is not None:
            return scoring.loglikelihood(self.session, requests, found, quiet=disable_tqdm)
        scores: list[tuple[float, bool]] = found
        check_scores(requests, [score for score, _ in scores])
        return scores

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns a text's tokens as `hf` encodes it, or without the tokenizer's suffix where text follows it.

        Contexts, and contexts with their continuations, are looked up among those that were encoded together.
        """
        if add_special_tokens is None and not kwargs and (known := self._encoded.get(string)) is not None:
            return list(known)
        if add_special_tokens is None and string.startswith(special_beginnings(self.tokenizer)):
            add_special_tokens = False
        return list(super().tok_encode(string, add_special_tokens=add_special_tokens, **kwargs))

    chat_template = loading.in_template(HFLM.chat_template)
    apply_chat_template = loading.in_template(HFLM.apply_chat_template)

    def _encode_together(self, pairs: Sequence[tuple[str, str]], *, quiet: bool) -> None:
        """Encodes together what `hf` will ask for text by text: contexts, and contexts with their continuations."""
        whole = [(context.rstrip(), context + continuation) for context, continuation in pairs if context]
        texts = list(dict.fromkeys(itertools.chain(*whole)))
        beginnings = (self.tokenizer.decode(self.prefix_token_id),) if texts else ()
        tokens = encode_texts(self, texts, beginnings=tuple(filter(None, beginnings)), quiet=quiet)
        self._encoded = dict(zip(texts, tokens, strict=True))

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before, behind = super()._encode_pair(context, continuation)
        if self.session is not None and not before:  # a context of white space, and a tokenizer that adds no prefix
            before = [self.prefix_token_id]
        return before, behind

    def _loglikelihood_tokens(self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any) -> Any:
        # where `hf`'s loglikelihood ends: it has checked and encoded the requests, which we score ourselves
        if self.session is None:
            return super()._loglikelihood_tokens(requests, **kwargs)
        return [(context, continuation) for _, context, continuation in requests]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text in nats, in windows as `hf` cuts them."""
        if self.session is None:
            scores: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
            check_scores(requests, scores)
            return scores
        self.session.self_test.check("scoring")
        texts = [self.tok_encode(request.args[0]) for request in requests]
        return scoring.loglikelihood_rolling(
            self.session, requests, texts, lead_in=self.prefix_token_id, quiet=disable_tqdm
        )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the continuation of each prompt up to its first stop sequence."""
        if self.session is None:
            texts: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
            return texts
        return generation.generate_until(self.session, self, requests, quiet=disable_tqdm)

    def tell(self, requests: list[Instance], answers: list[str]) -> None:
        """Counts answers to `generate_until` where lm-eval's response cache gave some of them."""
        if self.session is not None:
            generation.tell(self.session, requests, answers)

    def _model_generate(self, context: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.session is not None:
            return super()._model_generate(context, *args, **kwargs)
        watch = FiniteWatch(len(context), context.device)  # an encoder-decoder model, whose batches `hf` makes
        output = super()._model_generate(context, *args, **kwargs, **watch.arguments())
        generation.check_batch(watch, output.tolist(), self.model.generation_config.eos_token_id)
        return output

    def token_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TokenLogprobs]:
        """Returns the log-probabilities of each window's last targets; arguments are `TokenLogprobsRequest`."""
        session = self._causal(TOKEN_LOGPROBS)
        loading.warn_of_other_tokens(self.tokenizer, [request.args[0] for request in requests])
        return scoring.token_logprobs(session, requests, quiet=disable_tqdm)

    def target_logprobs(self, requests: list[Instance], disable_tqdm: bool = False) -> list[TargetLogprobs]:
        """Returns the log-probabilities of named targets; arguments are `TargetLogprobsRequest`."""
        return scoring.target_logprobs(self._causal(TARGET_LOGPROBS), requests, quiet=disable_tqdm)

    def attention_span(self, requests: list[Instance], disable_tqdm: bool = False) -> list[list[list[Any]]]:
        """Returns the effective spans of every layer and head; arguments are `AttentionSpanRequest`."""
        session = self._causal(ATTENTION_SPAN)
        loading.warn_of_other_tokens(self.tokenizer, [request.args[0] for request in requests])
        return scoring.attention_span(session, requests, quiet=disable_tqdm)

    def _causal(self, request_type: str) -> Session:
        if self.session is None:
            raise UserError(f"Expected a causal language model for {request_type}, found an encoder-decoder model.")
        self.session.self_test.check("scoring")
        return self.session

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        with loading.in_one_sentence(pretrained, "a model", **self._asking()):
            if isinstance(pretrained, str):
                refuse_adapter(local_path(pretrained) / (kwargs.get("subfolder") or ""))
            if not kwargs.get("gguf_file") and not kwargs.get("subfolder"):
                self._format = checkpoints.released_format(pretrained, kwargs["revision"])
                loading.check_kv_expand(pretrained, self._format[0], self.options.kv_expand)
            released, source = self._format
            if released is not None:
                self._config = PretrainedConfig()  # until the weights are read, which tell more than config.json does
                return
            check_weights(local_path(pretrained) / (kwargs.get("subfolder") or ""), source)
            checkpoints.register_fla_models()
            super()._get_config(pretrained, **kwargs)
            checkpoints.check_quantisation(self._config, local_path(pretrained) / (kwargs.get("subfolder") or ""))
        if (plan := self.arguments.get("tp_plan")) is not None:
            loading.check_tensor_plan(self._config, plan)
        loading.say_format(pretrained, checkpoint_format(self._config))

    def _get_backend(self, config: Any, backend: Any = "default", **kwargs: Any) -> None:
        causal = self._format[0] is not None or getattr(config, "model_type", None) == "sbeval"
        super()._get_backend(config, backend="causal" if causal and backend == "default" else backend, **kwargs)

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, **kwargs: Any) -> None:
        argument = "tokenizer" if tokenizer else "pretrained"
        asking = self._asking() if not tokenizer else {}
        with loading.in_one_sentence(tokenizer or pretrained, "a tokenizer", argument=argument, **asking):
            super()._create_tokenizer(pretrained, tokenizer, **kwargs)

    def _create_model(self, pretrained: str, **kwargs: Any) -> None:
        auto_class = self.AUTO_MODEL_CLASS
        checked: dict[str, Any] = {"allow_unread": self.options.allow_unread or (), "report": self._leave_unread}
        with (
            loading.in_one_sentence(pretrained, "a model's weights", **self._asking()),
            loading.whole_adapter(kwargs.get("peft"), **checked),
        ):
            if self._format[0] is None:
                load: Any = functools.partial(checkpoints.load_whole, auto_class, **checked)
            else:
                self.loaded = checkpoints.load_checkpoint(
                    pretrained,
                    dtype="auto" if kwargs["dtype"] is None else kwargs["dtype"],
                    device=self.device,
                    kv_expand=self.options.kv_expand,
                    trust_remote_code=bool(kwargs["trust_remote_code"]),
                    revision=kwargs["revision"],
                    found_format=self._format,
                )
                self._config = self.loaded.model.config
                loading.say_format(pretrained, self.loaded.format)
                loading.refuse_transformers_arguments(self.loaded.format, kwargs, convertible=self.loaded.extendable)
                model = self.loaded.model
                load = lambda *_, **__: model  # noqa: E731  of the dtype, device and revision it was loaded with
            self.AUTO_MODEL_CLASS = SimpleNamespace(from_pretrained=load)  # `hf` does the rest
            super()._create_model(pretrained, **kwargs)
        self._tied.enter_context(loading.tied_as_it_is(self._model))
        self.AUTO_MODEL_CLASS = auto_class

    def _asking(self) -> dict[str, Any]:
        """Returns what may ask for things that loading does not find here: arguments and the configuration."""
        return {"given": self.arguments, "config": self._format[1]}

    def _leave_unread(self, unread: UnreadTensors) -> None:
        self.unread |= unread

    all_gather = ranks.waiting()(HFLM.all_gather)
    gather_object = ranks.waiting()(HFLM.gather_object)
    barrier = ranks.waiting()(HFLM.barrier)

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Takes lm-eval's response cache, new or made with the same settings."""
        if self.session is not None:
            if cache_hook.dbdict is not None:
                shares = "tp_plan" if self.arguments.get("tp_plan") is not None else "context_parallel"
                if self.options.context_parallel > 1 or shares == "tp_plan":  # they would ask for different windows
                    raise UserError(
                        f"Expected no response cache beside {shares}, found --use_cache: leave one of them out."
                    )
                stamp(cache_hook.dbdict, run_settings(self))
            self.session = dataclasses.replace(self.session, cache_hook=cache_hook)
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Returns `hf`'s facts, and this run's `ModelRecord` under "sbeval"."""
        return {**super().get_model_info(), "sbeval": model_record(self).to_json()}
