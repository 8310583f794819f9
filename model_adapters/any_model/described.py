"""What a model of lm-eval is that this project did not load: its record, and what tells its answers from another's."""

import inspect
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import model_registry
from transformers import AutoConfig

import sbeval.models  # noqa: F401  registers the family with transformers' Auto classes
from sbeval.checkpoints.facts import text_config
from sbeval.fingerprint.checkpoint import checkpoint_parts
from sbeval.fingerprint.parts import Parts, installed_version, named, versions
from sbeval.hub_names import local_path
from sbeval.model_adapters.record import APART, checkpoint_facts, kernels_in_use, loaded_facts, model_parts
from sbeval.results.records import ModelRecord, recorded_command

_ENGINES = ("vllm", "sglang", "tensorrt_llm", "onnxruntime")
_LOADED = ("pretrained", "model_path")
_CHECKPOINTS = (*_LOADED, "model", "tokenizer", "tokenizer_path", "lora_local_path")
# beside what answers of `sb` do not depend on either: how a server is reached, and how many prompts at once
_APART = APART | {"num_concurrent", "max_retries", "timeout", "header", "auth_token", "ca_cert_path", "max_gen_toks"}
_APART |= {"verify_certificate", "gpu_memory_utilization", "mem_fraction_static", "max_model_len", "context_length"}


def given_arguments(lm: Any) -> dict[str, Any]:
    """Returns the arguments that a model was made with, by name."""
    positional, keywords = getattr(lm, "sbeval_arguments", ((), {}))
    names = list(inspect.signature(type(lm).__init__).parameters)[1:]
    return {**dict(zip(names, positional, strict=False)), **keywords}


def backend_name(lm: Any) -> str:
    """Returns lm-eval's name of a model's class, with the address of a server."""
    kind = type(lm)
    names = [name for name, known in model_registry.items() if known in (kind, f"{kind.__module__}:{kind.__name__}")]
    address = getattr(lm, "base_url", None)
    return (names[0] if names else kind.__name__) + (f" at {address}" if address else "")


def identity(lm: Any, name: str) -> str:
    """Returns a hash of all that answers depend on: backend, checkpoint by content, arguments, and versions.

    Of a server those are its address, the model's name and the tokenizer.

    Raises:
        OSError: a file of the checkpoint cannot be read.
    """
    arguments = {key: value for key, value in given_arguments(lm).items() if key not in _APART}
    written = json.dumps([name, _parts(lm), arguments], sort_keys=True, default=lambda other: type(other).__name__)
    return sha256(written.encode()).hexdigest()[:16]


def _parts(lm: Any) -> Parts:
    arguments = given_arguments(lm)
    if hasattr(lm, "base_url"):
        parts: Parts = {}
    else:
        parts = versions() | {engine: version for engine in _ENGINES if (version := installed_version(engine))}
    if all(hasattr(lm, name) for name in ("pretrained", "peft", "delta")):  # `hf` and its kin
        lm.arguments = arguments
        return parts | {"dtype": str(lm.model.dtype)} | model_parts(lm)
    for key in _CHECKPOINTS:
        if isinstance(value := arguments.get(key), str):
            parts |= named(key, checkpoint_parts(value, revision=arguments.get("revision")))
    return parts


def record(lm: Any, name: str, speed: float | None) -> ModelRecord:
    """Returns the record of a run that has finished."""
    arguments = given_arguments(lm)
    folders = [str(local_path(value)) for key in _CHECKPOINTS if isinstance(value := arguments.get(key), str)]
    loaded = next((arguments[key] for key in _LOADED if isinstance(arguments.get(key), str)), None)
    config = getattr(lm, "config", None) or getattr(lm, "_config", None)
    if config is None and (told := [folder for folder in folders if (Path(folder) / "config.json").is_file()]):
        config = AutoConfig.from_pretrained(told[0])
    model = getattr(lm, "model", None)
    facts = checkpoint_facts(text_config(config), loaded)
    if isinstance(model, torch.nn.Module):
        facts |= loaded_facts(model, lm.device) | {"kernels": kernels_in_use(model, "auto", lm.device)}
    elif loaded and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return ModelRecord(
        **{"dtype": arguments.get("dtype"), **facts},
        name=Path(loaded or arguments.get("model") or type(model).__name__).name,
        backend=name,
        inputs=_parts(lm) if loaded else {},
        max_length=getattr(lm, "max_length", None),
        command=recorded_command(),
        versions=versions() | {engine: version for engine in _ENGINES if (version := installed_version(engine))},
        tokens_per_second=speed,
    )
