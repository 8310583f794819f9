"""What a loaded model's answers rest on: its record in the results file, and the stamp of lm-eval's response cache.

The cache's keys hold a request's arguments only, so a database used with two models, or one model at two lengths,
would silently return the first one's answers.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from sbeval.attn_implementation import NAME as STICKBREAKING
from sbeval.checkpoints.facts import (
    checkpoint_format,
    declared_length_tokens,
    positive,
    text_config,
    training_length_tokens,
)
from sbeval.corpora import tokenizer_sha256
from sbeval.errors import UserError
from sbeval.fingerprint.checkpoint import checkpoint_parts, weights_sha256
from sbeval.fingerprint.parts import Parts, changes, named, short_sha256, shortened, versions
from sbeval.fingerprint.tasks import CACHE_ARGUMENTS
from sbeval.foreign_files import fits, read_json_object
from sbeval.model_adapters.decoding.texts import added_by_tokenizer
from sbeval.model_adapters.loading import in_one_sentence
from sbeval.model_adapters.prepare.changes.seen_keys import attention_before
from sbeval.results.records import ModelRecord, recorded_command

STAMP_KEY = "sbeval:settings"
_INPUTS = "inputs"
# arguments that answers do not depend on, or that have a setting or an input of their own
APART = CACHE_ARGUMENTS | {
    *("batch_size", "max_batch_size", "device", "parallelize", "max_memory_per_gpu", "max_cpu_memory"),
    *("trust_remote_code", "tokenizer", "revision", "subfolder", "dtype"),
    *("mixed_precision_dtype", "peft", "delta", "max_length", "add_bos_token", "prefix_token_id", "think_end_token"),
}
_OF_LM = ("max_length", "skip_threshold", "add_bos_token", "prefix_token_id", "think_end_token")
_OF_OPTIONS = ("training_length", "kv_expand", "truncation", "non_finite", "thinking_tokens")
T = TypeVar("T")


def kernels_in_use(model: nn.Module, chosen: str, device: torch.device) -> str | None:
    """Returns what computes attention: our implementation's name, or transformers' for softmax attention."""
    config = text_config(getattr(model, "config", None))
    if (head_dim := _stickbreaking_head_dim(config)) is not None:
        if chosen != "auto":
            return chosen
        supported = device.type == "cuda" and head_dim <= 256 and dtype_of(model) != torch.float64
        return "triton" if supported else "blockwise"
    return attention_before(getattr(config, "_attn_implementation", None))


def _stickbreaking_head_dim(config: Any) -> int | None:
    model_type = getattr(config, "model_type", None)
    if model_type == "sbeval" and "stickbreaking" in config.schemes:
        return int(config.head_dim)
    if model_type == "moduleformer" and hasattr(config, "attention_width"):
        return int(config.attention_width) // int(config.num_attention_heads)
    return None


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Returns the dtype of the first floating-point parameter."""
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)


def model_record(lm: Any) -> ModelRecord:
    """Returns the record of a run of `StickBreakingLM` that has finished."""
    model, loaded, device = lm.model, lm.loaded, lm.device
    pretrained = lm.pretrained if isinstance(lm.pretrained, str) else None
    config = text_config(getattr(model, "config", None))
    extrapolation = lm.session.rope.extrapolation if lm.session else None
    facts = model_facts(config, str(loaded.folder) if loaded and loaded.folder else pretrained, model)
    if loaded:
        facts |= {"format": loaded.format, "attention": loaded.attention}
    if lm.options.training_length:
        facts["training_length_tokens"] = lm.options.training_length
    return ModelRecord(
        **facts | gpu_facts(device),
        name=Path(pretrained).name if pretrained else type(model).__name__,
        inputs=(_read(lambda: model_parts(lm)) or {}) if pretrained else {},
        kernels=kernels_in_use(model, lm.options.kernels, device),
        rope_scaling=lm.session.rope.in_force if lm.session else None,
        extrapolation=extrapolation.to_json() if extrapolation else None,
        skip_threshold=lm.skip_threshold,
        unread=lm.unread.to_json(),
        max_length=lm.max_length,
        command=recorded_command(),
        versions=versions(),
        tokens_per_second=lm.session.meter.tokens_per_second if lm.session else None,
        generated=dataclasses.asdict(lm.session.tally) if lm.session and lm.session.tally.answers else None,
        thinking_tokens=lm.options.thinking_tokens,
        self_test=lm.session.self_test.to_json() if lm.session and lm.session.self_test.model else None,
        added_tokens=added_by_tokenizer(lm),
        prepared=lm.prepared.to_json(),
    )


def model_facts(config: Any, folder: str | None, model: Any) -> dict[str, Any]:
    """Returns what configuration, folder and, where it is one of this process, the model tell of a `ModelRecord`."""
    own = getattr(config, "model_type", None) == "sbeval"
    by_name = getattr(config, "_attn_implementation", None) == STICKBREAKING
    recipe, training_seed = _training(folder)
    facts: dict[str, Any] = {
        "format": checkpoint_format(config),
        "checkpoint_sha256": _read(lambda: weights_sha256(Path(folder))) if folder else None,
        "training_length_tokens": training_length_tokens(config),
        "declared_length_tokens": declared_length_tokens(config),
        "extended_from": getattr(config, "extended_from", None),
        "attention": config.scheme if own else STICKBREAKING if by_name else getattr(config, "model_type", None),
        "sliding_window": positive(getattr(config, "sliding_window", None)),
        "remainder": config.remainder if own else None,
        "head_norm": config.head_norm if own else None,
        "recipe": recipe,
        "training_seed": training_seed,
    }
    if not isinstance(model, nn.Module):
        return facts
    dtype = dtype_of(model)
    facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return facts | {"dtype": str(dtype).removeprefix("torch.") if dtype else None}


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """Returns the device's name and the most memory that was allocated, nothing of a CPU."""
    if device.type != "cuda":
        return {}
    allocated = map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))
    return {"gpu": torch.cuda.get_device_name(device), "peak_memory_bytes": sum(allocated) or None}


def model_parts(lm: Any) -> Parts:
    """Returns the parts of a loaded model: checkpoint, adapters and tokenizer, whether files or objects."""
    subfolder = lm.arguments.get("subfolder") or ""
    if isinstance(lm.pretrained, str):
        parts = checkpoint_parts(lm.pretrained, revision=lm.revision, subfolder=subfolder)
    else:
        parts = {"weights": _tensors_sha256(lm.model)}
        for name in ("config", "generation_config"):
            settings = getattr(lm.model, name, None)
            kept = settings.to_dict() if settings else {}
            kept.pop("_name_or_path", None)
            parts[f"{name}.json"] = short_sha256(json.loads(json.dumps(kept, default=str)))
    for name, value in (("peft", lm.peft), ("delta", lm.delta)):
        parts |= named(name, checkpoint_parts(value, revision=lm.revision)) if value else {}
    tokenizer = lm.arguments.get("tokenizer")
    if isinstance(tokenizer, str):
        parts |= named("tokenizer", checkpoint_parts(tokenizer, revision=lm.revision, subfolder=subfolder))
    elif tokenizer is not None or not isinstance(lm.pretrained, str):
        parts["tokenizer"] = shortened(tokenizer_sha256(lm.tokenizer))
    return parts


def stamp(database: Any, settings: Mapping[str, Any]) -> None:
    """Writes the settings into an empty response cache, an `SqliteDict`, or compares them with those of a used one.

    They are JSON-ready values by name; `inputs` are the parts of a fingerprint.

    Raises:
        UserError: the cache was made with other settings or inputs, or by an earlier version or another model.
    """
    given = json.loads(json.dumps(settings))
    # looked for and written in one statement, so that of two models that start together the cache is one's
    insert = "INSERT INTO {0} SELECT ?, ? WHERE NOT EXISTS (SELECT 1 FROM {0})"
    database.conn.execute(insert.format(f'"{database.tablename}"'), (STAMP_KEY, database.encode(given)))
    if (found := database.get(STAMP_KEY)) is None or _INPUTS not in found:
        expected = "Expected a response cache made by this version of the model sb"
        raise UserError(f"{expected}, found one without its settings: name another file with --use_cache.")
    differences = [
        f"{name}={found.get(name)!r} instead of {given.get(name)!r}"
        for name in {**found, **given}
        if found.get(name) != given.get(name) and name != _INPUTS
    ]
    if changed := changes(found[_INPUTS], given[_INPUTS]):
        differences.append(f"other inputs ({changed})")
    if differences:
        raise UserError(
            f"Expected a response cache made with this run's settings, found one made with {', '.join(differences)}: "
            "use the same settings and inputs, or name another file with --use_cache."
        )


def run_settings(lm: Any) -> dict[str, Any]:
    """Returns the settings of a loaded `StickBreakingLM` by name, JSON-ready, with its inputs.

    Raises:
        UserError: a file of the checkpoint cannot be read.
    """
    with in_one_sentence(lm.pretrained, "files that can be read for --use_cache"):
        parts = model_parts(lm)
    options, arguments, rope_scaling = lm.options, lm.arguments, lm.session.rope.in_force
    return {
        _INPUTS: versions() | parts,
        "device": lm.device.type,
        "dtype": str(lm.model.dtype),
        "mixed_precision_dtype": str(lm.mixed_precision_dtype) if lm.mixed_precision_dtype else None,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "extrapolation": str(lm.session.rope.extrapolation) if lm.session.rope.extrapolation else None,
        "kernels": kernels_in_use(lm.model, options.kernels, lm.device),
        **{name: getattr(options, name) for name in _OF_OPTIONS},
        **{name: getattr(lm, name) for name in _OF_LM},
        "self_test": lm.session.self_test.ways(),
        "arguments": {name: _json_ready(value) for name, value in sorted(arguments.items()) if name not in APART},
        # a tokenizer that adds no suffix gives the same answers with both, and as before the option was there
        **({"template_suffix": options.template_suffix} if (added_by_tokenizer(lm) or {}).get("suffix") else {}),
        **({} if options.thinking_tokens is None else {"answers_with_facts": True}),  # as a cache has them
    }


def _json_ready(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__))


def _read(files: Callable[[], T]) -> T | None:
    """Returns what is read from files, None if they are gone by now: the run has ended, and its numbers stand."""
    try:
        return files()
    except OSError:
        return None


def _training(pretrained: str | None) -> tuple[str | None, int | None]:
    """Returns recipe and seed from the record that `sbeval train` leaves in a checkpoint, None where there is none."""
    try:
        recipe = read_json_object(Path(pretrained or "") / "training_record.json", "the record of a training")["recipe"]
        name, seed = recipe["name"], recipe["seed"]
    except (UserError, KeyError, TypeError):
        return None, None
    return (name, seed) if fits(name, str) and fits(seed, int) else (None, None)


def _tensors_sha256(model: nn.Module) -> str:
    """Returns a hash over the name, type and values of every parameter and buffer, for a model that is in no folder."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(values)
    return shortened(digest.hexdigest())
