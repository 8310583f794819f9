"""A model of lm-eval that scores tokens: how it is called, what it takes whole, and what is kept and recorded of it.

Every piece is kept in lm-eval's cache under its tokens and what the model is: a run that failed asks for nothing twice.
lm-eval adds up whatever comes back; `sbeval.scoring.returned` says which answers can be right.
"""

import contextlib
import dataclasses
import inspect
import json
import logging
import math
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import torch
from lm_eval.api.model import hash_args
from transformers import AutoConfig

import sbeval.models  # noqa: F401  registers the family with transformers' Auto classes
from sbeval.checkpoints.facts import text_config
from sbeval.corpora import tokenizer_sha256
from sbeval.corpora.tokenizers import added_tokens
from sbeval.errors import UserError, first_line
from sbeval.fingerprint.checkpoint import checkpoint_parts
from sbeval.fingerprint.parts import Parts, installed_version, named, shortened, versions
from sbeval.fingerprint.tasks import CACHE_ARGUMENTS
from sbeval.hub_names import local_path
from sbeval.model_adapters.record import gpu_facts, kernels_in_use, model_facts, model_parts
from sbeval.results.records import USERINFO, ModelRecord, recorded_command
from sbeval.scoring.guarded import backend_name, guard
from sbeval.scoring.returned import ROUNDING_NATS, OtherPromptError, WrongAnswerError, prompt_tokens

_PROBE = "It is better than a 1,234,567th naïve café — 東京 αβγ!\n\tdef f(x):\n        return {'implicit': [x ** 2]}"
_KIND = "loglikelihood"  # under which lm-eval keeps what `_loglikelihood_tokens` answers
# by how much `max_length` has to exceed context and continuation, of which lm-eval 0.4.13 cuts the beginning otherwise
_SPARE = {"HFLM": -1, "NEURON_HF": -1, "VLLM": 1, "TemplateAPI": 0}
_ENGINES = ("vllm", "sglang", "tensorrt_llm", "onnxruntime")
_LOADED = ("pretrained", "model_path")
_CHECKPOINTS = (*_LOADED, "model", "tokenizer", "tokenizer_path", "lora_local_path")
# arguments that no sum over given tokens depends on: how many prompts at once, where, and how a server is reached
_APART = CACHE_ARGUMENTS | {
    *("batch_size", "max_batch_size", "device", "parallelize", "max_memory_per_gpu", "max_cpu_memory"),
    *("tokenizer", "use_fast_tokenizer", "add_bos_token", "prefix_token_id", "max_length", "truncation"),
    *("think_end_token", "enable_thinking", "chat_template_args", "max_gen_toks", "num_concurrent", "max_retries"),
    *("timeout", "header", "auth_token", "ca_cert_path", "verify_certificate"),
    *("gpu_memory_utilization", "mem_fraction_static"),
}

Score = tuple[float, bool]
"""The sum of a continuation's log-probabilities in nats, and whether each of its tokens is the most probable."""


@dataclasses.dataclass(slots=True)
class Backend:
    """A loaded model; `name` is lm-eval's, with the address of a server."""

    lm: Any
    name: str
    tokens: int = 0
    seconds: float = 0.0
    _identity: str | None = None

    @classmethod
    def of(cls, lm: Any) -> Self:
        """Returns a model's backend, the same each time, and has the model describe itself; refuses an encoder."""
        if (known := getattr(lm, "sbeval_backend", None)) is not None:
            if not any(isinstance(_arguments(lm).get(key), str) for key in _CHECKPOINTS[:3]):
                known._identity = None  # of a model in memory, which may have been trained since
            return known  # type: ignore[no-any-return]
        guard(lm)
        if getattr(lm, "backend", "causal") != "causal":
            raise UserError(f"Expected a causal language model to score windows of tokens, found {lm.backend}.")
        lm.sbeval_backend = backend = cls(lm, backend_name(lm))
        described = getattr(lm, "get_model_info", dict)
        lm.get_model_info = lambda: {**described(), "sbeval": backend.record().to_json()}
        return backend

    def kept(self, name: str) -> Score | None:
        """Returns what the response cache holds of a piece, None where this model was not asked for it."""
        database = self.lm.cache_hook.dbdict
        held = None if database is None else database.get(hash_args(_KIND, self._key(name)))
        # lm-eval keeps what comes back before it is seen here: what is no log-probability is asked for again
        return held if held is not None and -math.inf < held[0] <= ROUNDING_NATS else None

    def check_room(self, tokens: int) -> None:
        """Refuses pieces of which lm-eval would cut the beginning; `tokens` are context and continuation."""
        kinds = [kind.__name__ for kind in type(self.lm).__mro__]
        spare = next((_SPARE[kind] for kind in kinds if kind in _SPARE), 0)
        longest = getattr(self.lm, "max_length", None)
        if longest is None or tokens + spare <= longest:
            return
        asked = tokens + spare + ("TemplateAPI" in kinds)  # which takes one from what it was given
        raise UserError(
            f"Expected windows of at most {longest - spare - 1} tokens, which {self.name} takes whole, found one of "
            f"{tokens - 1}: pass max_length={asked} in --model_args (context_length to sglang), if the model goes that "
            "far, or ask for shorter context_lengths."
        )

    def score(
        self,
        texts: Mapping[str, tuple[list[int], list[int]]],
        requests: Mapping[str, str],
        answered: int,
        planned: int,
        *,
        quiet: bool,
    ) -> dict[str, Score]:
        """Scores pieces in one call: context and continuation by name, and the names of the requests they are of.

        Raises:
            UserError: the model failed, or its answer cannot be right; names the request and says where the run stands.
        """
        batch, hook = [(self._key(name), *pair) for name, pair in texts.items()], self.lm.cache_hook
        in_float32 = getattr(self.lm, "softmax_dtype", True) is None  # `hf` adds in the model's own type unless told
        began = time.perf_counter()
        logging.getLogger("asyncio").addFilter(_awaited)
        try:
            if in_float32:
                self.lm.softmax_dtype = torch.float32
            if not self.tokens and (fault := self._tokenizer_fault()):
                with contextlib.suppress(OtherPromptError):
                    self.lm._loglikelihood_tokens(batch[:1], disable_tqdm=quiet)  # which may show another reason
                raise UserError(fault)
            answers = self.lm._loglikelihood_tokens(batch, disable_tqdm=quiet)
            scores = {name: (float(of[0]), bool(of[1])) for name, of in zip(texts, answers, strict=True)}
            for name, (nats, _) in scores.items():
                if not -math.inf < nats <= ROUNDING_NATS * max(1, len(texts[name][1])):
                    said = f"Expected {self.name} to tell log-probabilities, found a sum of {nats:.4g}"
                    raise WrongAnswerError(said, [*texts[name][0], *texts[name][1]])
        except Exception as error:  # a server's, an engine's, or lm-eval's for what it did not expect
            reason = USERINFO.sub("", first_line(error))
            said = f"Expected {self.name} to score tokens, found {type(error).__name__} ({reason})"
            answered += sum(self.kept(name) is not None for name in texts)
            kept = f"{answered} of {planned} answers are kept by --use_cache; the same command goes on after them"
            if hook.dbdict is None:
                kept = "with --use_cache FILE answers are kept as they come, and the same command goes on after them"
            if isinstance(error, UserError):
                said = f"{error}{_request(error, texts, requests)}"
            raise UserError(f"{said}: {kept}.") from error
        finally:
            if in_float32:
                self.lm.softmax_dtype = None
        self.seconds += time.perf_counter() - began
        self.tokens += sum(map(len, (tokens for pair in texts.values() for tokens in pair)))
        for name, score in scores.items():
            if hook.dbdict is not None and math.isfinite(score[0]) and self.kept(name) is None:
                hook.add_partial(_KIND, self._key(name), score)
        return scores

    def config(self) -> Any:
        """Returns the configuration of the model, or of the folder that is named for it or its tokenizer."""
        config = getattr(self.lm, "config", None) or getattr(self.lm, "_config", None)
        names = [name for key in _CHECKPOINTS if isinstance(name := _arguments(self.lm).get(key), str)]
        told = next((name for name in names if (local_path(name) / "config.json").is_file()), None)
        if config is None and told:
            with contextlib.suppress(Exception):  # of a kind that transformers does not know, or by code of its own
                config = AutoConfig.from_pretrained(local_path(told), trust_remote_code=False)
        return text_config(config)

    def record(self) -> ModelRecord:
        """Returns the record of a run that has finished."""
        lm, arguments = self.lm, _arguments(self.lm)
        loaded = next((name for key in _LOADED if isinstance(name := arguments.get(key), str)), None)
        model = getattr(lm, "model", None)
        facts = {"dtype": arguments.get("dtype"), **model_facts(self.config(), loaded, model)}
        if isinstance(model, torch.nn.Module):
            facts |= {"kernels": kernels_in_use(model, "auto", lm.device)}
        if loaded:
            facts |= gpu_facts(lm.device or torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return ModelRecord(
            **facts,
            name=Path(loaded or str(arguments.get("model") or type(model).__name__)).name,
            backend=self.name,
            inputs=self._inputs(),
            max_length=getattr(lm, "max_length", None),
            command=recorded_command(),
            versions=_versions(),
            tokens_per_second=self.tokens / self.seconds if self.seconds else None,
            added_tokens=self._added_tokens(),
        )

    def _added_tokens(self) -> dict[str, Any] | None:
        """Returns what the model's tokenizer adds to a text, None where it adds nothing or cannot be asked."""
        tokenizer = getattr(self.lm, "tokenizer", None)
        if not (hasattr(tokenizer, "get_vocab") and any(added := added_tokens(tokenizer))):
            return None
        names = added.to_json(tokenizer)
        listed = " and ".join(" ".join(tokens) for tokens in names.values() if tokens)
        facts = f"the tokenizer adds {listed} to a text; windows are given as tokens and get nothing added"
        return {**names, "sentence": f"{facts}; {self.name} decides what it adds to prompts of text"}

    def _key(self, name: str) -> tuple[str, str]:
        """Returns what the response cache keeps a piece under: of a server its address, model and tokenizer."""
        if self._identity is None:
            settings = {key: value for key, value in _arguments(self.lm).items() if key not in _APART}
            if not hasattr(self.lm, "base_url"):
                computes = {"dtype": getattr(getattr(self.lm, "model", None), "dtype", settings.get("dtype"))}
                computes["device"] = str(getattr(self.lm, "device", None)).partition(":")[0]
                settings |= {"versions": _versions(), **computes}  # among them one of peft, which is an argument too
            depends_on = [self.name, self._inputs(), settings]
            written = json.dumps(depends_on, sort_keys=True, default=lambda of: type(of).__name__ + str(of)[:40])
            self._identity = sha256(written.encode()).hexdigest()[:16]
        return (self._identity, name)

    def _inputs(self) -> Parts:
        arguments, inputs = _arguments(self.lm), Parts()
        if all(hasattr(self.lm, name) for name in ("pretrained", "peft", "delta")):  # `hf` and its kin
            source = self.lm.pretrained if isinstance(self.lm.pretrained, str) else None
            model, tokenizer = (getattr(self.lm, name, None) for name in ("model", "tokenizer"))
            return model_parts(source, arguments, model=model, tokenizer=tokenizer)
        if hasattr(self.lm, "base_url"):  # what it names as model is the server's
            tokenizer = getattr(self.lm, "tokenizer", None)
            return {"tokenizer": shortened(tokenizer_sha256(tokenizer))} if hasattr(tokenizer, "get_vocab") else {}
        for key in _CHECKPOINTS:
            if isinstance(value := arguments.get(key), str):
                inputs |= named(key, checkpoint_parts(value, revision=arguments.get("revision")))
        return inputs

    def _tokenizer_fault(self) -> str | None:
        """Has a server count the tokens of a text, where it does that, and compares the count with the tokenizer's."""
        lm = self.lm
        with contextlib.suppress(Exception):  # it takes no text, tells no count, or fails, which the first piece shows
            count = len(lm.tokenizer(_PROBE, add_special_tokens=False)["input_ids"])
            told = prompt_tokens(lm.model_call([_PROBE], generate=False))
            if told is not None and told - count not in (0, 1):  # it may put BOS before a text
                given = f"found that tokenizer={lm.tokenizer.name_or_path} makes {count} tokens of a text"
                return f"Expected the tokenizer of {self.name}, {given} where the server counts {told}: name its own"
        return None


def _request(error: UserError, texts: Mapping[str, tuple[list[int], list[int]]], requests: Mapping[str, str]) -> str:
    """Returns the name of the request whose answer is wrong, in brackets; nothing where no one request is at fault."""
    prompt = getattr(error, "prompt", None)
    named = (requests[name] for name, (context, targets) in texts.items() if [*context, *targets] == prompt)
    return next((f" ({name})" for name in named), "")


def _awaited(record: logging.LogRecord) -> bool:
    """Whether asyncio tells something else than requests beside one that failed, which nobody waits for any more.

    It does so whenever they are collected, at the latest as Python ends: the filter stays in place.
    """
    return not any(said in record.getMessage() for said in ("never retrieved", "unhandled exception during asyncio"))


def _versions() -> Parts:
    return versions() | {name: version for name in _ENGINES if (version := installed_version(name))}


def _arguments(lm: Any) -> dict[str, Any]:
    """Returns the arguments that a model was made with, by name."""
    positional, keywords = getattr(lm, "sbeval_arguments", ((), {}))
    names = list(inspect.signature(type(lm).__init__).parameters)[1:]
    return {**dict(zip(names, positional, strict=False)), **keywords}
