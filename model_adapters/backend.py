"""An lm-eval model that scores tokens (`hf`, `vllm`, a server): its calls, limits, response cache and record.

A chunk is one request to the model: a context and a continuation, as tokens. Its score is stored in lm-eval's response
cache under a hash of the tokens and of the model, so a run that is repeated after a failure requests no chunk twice.
The model `sb` instead checks once that the whole cache file was made with its settings. That is impossible here, since
lm-eval writes the answers of other tasks into the file before this module is called. lm-eval sums log-probabilities
without checking them; `sbeval.scoring.returned` refuses answers that cannot be right.
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
_KIND = "loglikelihood"  # the request type under which lm-eval stores answers of `_loglikelihood_tokens`
# how many tokens `max_length` must be above context and continuation, else lm-eval 0.4.13 cuts the beginning of inputs
_SPARE = {"HFLM": -1, "NEURON_HF": -1, "VLLM": 1, "TemplateAPI": 0}
_ENGINES = ("vllm", "sglang", "tensorrt_llm", "onnxruntime")
_LOADED = ("pretrained", "model_path")
_CHECKPOINTS = (*_LOADED, "model", "tokenizer", "tokenizer_path", "lora_local_path")
# arguments that do not change the log-probabilities of given tokens: batch sizes, devices, how a server is reached
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
    """A loaded lm-eval model; `name` is lm-eval's name for it, with the address if it is a server."""

    lm: Any
    name: str
    tokens: int = 0
    seconds: float = 0.0
    _identity: str | None = None

    @classmethod
    def of(cls, lm: Any) -> Self:
        """Returns the `Backend` of a model, the same object on each call, and adds a record to `lm.get_model_info`.

        Raises:
            UserError: the model is not a causal language model.
        """
        if (known := getattr(lm, "sbeval_backend", None)) is not None:
            if not any(isinstance(_arguments(lm).get(key), str) for key in _CHECKPOINTS[:3]):
                known._identity = None  # a model in memory may have been trained since the last call
            return known  # type: ignore[no-any-return]
        guard(lm)
        if getattr(lm, "backend", "causal") != "causal":
            raise UserError(f"Expected a causal language model to score windows of tokens, found {lm.backend}.")
        lm.sbeval_backend = backend = cls(lm, backend_name(lm))
        described = getattr(lm, "get_model_info", dict)
        lm.get_model_info = lambda: {**described(), "sbeval": backend.record().to_json()}
        return backend

    def cached_score(self, name: str) -> Score | None:
        """Returns the score of a chunk from the response cache, None if the cache does not hold it for this model."""
        database = self.lm.cache_hook.dbdict
        score = None if database is None else database.get(hash_args(_KIND, self._key(name)))
        # lm-eval stores scores before they are checked here, so a value that cannot be a log-probability is ignored
        return score if score is not None and -math.inf < score[0] <= ROUNDING_NATS else None

    def check_room(self, tokens: int) -> None:
        """Refuses chunks whose beginning lm-eval would cut off; `tokens` is the length of context and continuation."""
        kinds = [kind.__name__ for kind in type(self.lm).__mro__]
        spare = next((_SPARE[kind] for kind in kinds if kind in _SPARE), 0)
        longest = getattr(self.lm, "max_length", None)
        if longest is None or tokens + spare <= longest:
            return
        needed = tokens + spare + ("TemplateAPI" in kinds)  # lm-eval subtracts one from a server's max_length
        raise UserError(
            f"Expected windows of at most {longest - spare - 1} tokens, which {self.name} takes whole, found one of "
            f"{tokens - 1}: pass max_length={needed} in --model_args (context_length to sglang), if the model can read "
            "that many, or ask for shorter context_lengths."
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
        """Scores chunks in one call of the model, and returns the scores by the name of the chunk.

        Raises:
            UserError: the model failed or returned an impossible answer. The message names the request and says how
                many chunks are cached.
        """
        batch, hook = [(self._key(name), *pair) for name, pair in texts.items()], self.lm.cache_hook
        in_float32 = (
            getattr(self.lm, "softmax_dtype", True) is None
        )  # by default `hf` computes log-probabilities in the model's own dtype
        began = time.perf_counter()
        logging.getLogger("asyncio").addFilter(_awaited)
        try:
            if in_float32:
                self.lm.softmax_dtype = torch.float32
            if not self.tokens and (fault := self._tokenizer_fault()):
                with contextlib.suppress(OtherPromptError):
                    self.lm._loglikelihood_tokens(batch[:1], disable_tqdm=quiet)  # this may raise a clearer error
                raise UserError(fault)
            answers = self.lm._loglikelihood_tokens(batch, disable_tqdm=quiet)
            scores = {name: (float(of[0]), bool(of[1])) for name, of in zip(texts, answers, strict=True)}
            for name, (nats, _) in scores.items():
                if not -math.inf < nats <= ROUNDING_NATS * max(1, len(texts[name][1])):
                    fault_text = f"Expected {self.name} to tell log-probabilities, found a sum of {nats:.4g}"
                    raise WrongAnswerError(fault_text, [*texts[name][0], *texts[name][1]])
        except Exception as error:  # raised by a server, an engine, or lm-eval for an answer that it cannot parse
            reason = USERINFO.sub("", first_line(error))
            message = f"Expected {self.name} to score tokens, found {type(error).__name__} ({reason})"
            answered += sum(self.cached_score(name) is not None for name in texts)
            progress = f"{answered} of {planned} answers are kept by --use_cache; the same command goes on after them"
            if hook.dbdict is None:
                progress = (
                    "with --use_cache FILE answers are kept as they come, and the same command goes on after them"
                )
            if isinstance(error, UserError):
                message = f"{error}{_request(error, texts, requests)}"
            raise UserError(f"{message}: {progress}.") from error
        finally:
            if in_float32:
                self.lm.softmax_dtype = None
        self.seconds += time.perf_counter() - began
        self.tokens += sum(map(len, (tokens for pair in texts.values() for tokens in pair)))
        for name, score in scores.items():
            if hook.dbdict is not None and math.isfinite(score[0]) and self.cached_score(name) is None:
                hook.add_partial(_KIND, self._key(name), score)
        return scores

    def config(self) -> Any:
        """Returns the configuration of the model object, or else of the folder that the arguments name."""
        config = getattr(self.lm, "config", None) or getattr(self.lm, "_config", None)
        names = [name for key in _CHECKPOINTS if isinstance(name := _arguments(self.lm).get(key), str)]
        folder = next((name for name in names if (local_path(name) / "config.json").is_file()), None)
        if config is None and folder:
            with contextlib.suppress(Exception):  # transformers may not know the model type
                config = AutoConfig.from_pretrained(local_path(folder), trust_remote_code=False)
        return text_config(config)

    def record(self) -> ModelRecord:
        """Returns the `ModelRecord` of a finished run."""
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
        """Returns which tokens the tokenizer adds to a text; None if it adds none or has no vocabulary to look at."""
        tokenizer = getattr(self.lm, "tokenizer", None)
        if not (hasattr(tokenizer, "get_vocab") and any(added := added_tokens(tokenizer))):
            return None
        names = added.to_json(tokenizer)
        listed = " and ".join(" ".join(tokens) for tokens in names.values() if tokens)
        facts = f"the tokenizer adds {listed} to a text; windows are given as tokens and get nothing added"
        return {**names, "sentence": f"{facts}; {self.name} decides what it adds to prompts of text"}

    def _key(self, name: str) -> tuple[str, str]:
        """Returns the key of a chunk in the response cache.

        It contains a hash of the model; for a server, a hash of its address, model name and tokenizer.
        """
        if self._identity is None:
            settings = {key: value for key, value in _arguments(self.lm).items() if key not in _APART}
            if not hasattr(self.lm, "base_url"):
                computes = {"dtype": getattr(getattr(self.lm, "model", None), "dtype", settings.get("dtype"))}
                computes["device"] = str(getattr(self.lm, "device", None)).partition(":")[0]
                settings |= {"versions": _versions(), **computes}  # replaces arguments with the same names
            depends_on = [self.name, self._inputs(), settings]
            written = json.dumps(depends_on, sort_keys=True, default=lambda of: type(of).__name__ + str(of)[:40])
            self._identity = sha256(written.encode()).hexdigest()[:16]
        return (self._identity, name)

    def _inputs(self) -> Parts:
        arguments, inputs = _arguments(self.lm), Parts()
        if all(hasattr(self.lm, name) for name in ("pretrained", "peft", "delta")):  # `hf` and its subclasses
            source = self.lm.pretrained if isinstance(self.lm.pretrained, str) else None
            model, tokenizer = (getattr(self.lm, name, None) for name in ("model", "tokenizer"))
            return model_parts(source, arguments, model=model, tokenizer=tokenizer)
        if hasattr(self.lm, "base_url"):  # a server: its model argument names no file on this machine
            tokenizer = getattr(self.lm, "tokenizer", None)
            return {"tokenizer": shortened(tokenizer_sha256(tokenizer))} if hasattr(tokenizer, "get_vocab") else {}
        for key in _CHECKPOINTS:
            if isinstance(value := arguments.get(key), str):
                inputs |= named(key, checkpoint_parts(value, revision=arguments.get("revision")))
        return inputs

    def _tokenizer_fault(self) -> str | None:
        """Returns an error message if server and tokenizer count different numbers of tokens in a text, else None."""
        lm = self.lm
        # if the server takes no text or returns no count, this check is left out
        with contextlib.suppress(Exception):
            count = len(lm.tokenizer(_PROBE, add_special_tokens=False)["input_ids"])
            counted = prompt_tokens(lm.model_call([_PROBE], generate=False))
            if counted is not None and counted - count not in (0, 1):  # the server may put BOS before a text
                difference = f"makes {count} tokens of a text where the server counts {counted}"
                return (
                    f"Expected the tokenizer of {self.name}, found that tokenizer={lm.tokenizer.name_or_path} "
                    f"{difference}: name the model's own tokenizer"
                )
        return None


def _request(error: UserError, texts: Mapping[str, tuple[list[int], list[int]]], requests: Mapping[str, str]) -> str:
    """Returns the name of the request with the wrong answer, in brackets; "" if the error names no single prompt."""
    prompt = getattr(error, "prompt", None)
    named = (requests[name] for name, (context, targets) in texts.items() if [*context, *targets] == prompt)
    return next((f" ({name})" for name in named), "")


def _awaited(record: logging.LogRecord) -> bool:
    """A log filter for asyncio: false for reports about requests that were abandoned after another request failed.

    asyncio logs such reports when the requests are garbage-collected, at the latest when Python ends. So the filter is
    never removed.
    """
    return not any(text in record.getMessage() for text in ("never retrieved", "unhandled exception during asyncio"))


def _versions() -> Parts:
    return versions() | {name: version for name in _ENGINES if (version := installed_version(name))}


def _arguments(lm: Any) -> dict[str, Any]:
    """Returns the arguments that a model was constructed with, by name."""
    positional, keywords = getattr(lm, "sbeval_arguments", ((), {}))
    names = list(inspect.signature(type(lm).__init__).parameters)[1:]
    return {**dict(zip(names, positional, strict=False)), **keywords}
