"""The model's record in the results file, and the stamp of lm-eval's response cache: the settings that it belongs to.

The keys of the response cache are hashes of the arguments of requests only. So a cache that was used with another
model, or with the same model and another maximum length, would silently return wrong answers. Therefore the settings of
a run are written into the cache (the stamp), and a cache with other settings is refused.
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
    extended_from,
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
from sbeval.model_adapters.open.errors import explaining_load_errors
from sbeval.model_adapters.open.opened import Opened
from sbeval.model_adapters.open.tokenizer import added_to_texts
from sbeval.model_adapters.prepare.changes.visible_keys import attention_before
from sbeval.model_adapters.prepare.prepared import Prepared
from sbeval.model_adapters.session import Session
from sbeval.models.config import WITH_ENTMAX
from sbeval.models.entmax.kernel import is_installed
from sbeval.results.records import ModelRecord, recorded_command

STAMP_KEY = "sbeval:settings"
_INPUTS = "inputs"
# arguments that do not change answers, or whose values have their own entries in `run_settings` or in the fingerprint
APART = CACHE_ARGUMENTS | {
    *("batch_size", "max_batch_size", "device", "parallelize", "max_memory_per_gpu", "max_cpu_memory"),
    *("trust_remote_code", "tokenizer", "revision", "subfolder", "dtype"),
    *("mixed_precision_dtype", "peft", "delta", "max_length", "add_bos_token", "prefix_token_id", "think_end_token"),
}
_OF_OPENED = ("max_length", "add_bos_token", "prefix_token_id", "think_end_token")
_OF_OPTIONS = ("training_length", "kv_expand", "truncation", "non_finite", "thinking_tokens")
T = TypeVar("T")


def kernels_in_use(model: nn.Module, chosen: str, device: torch.device) -> str | None:
    """Returns the name of the attention implementation.

    It names our kernels for stick-breaking attention, "adasplash" or "blockwise" for entmax, else transformers' name.
    """
    config = text_config(getattr(model, "config", None))
    if getattr(config, "model_type", None) == "sbeval" and config.attention_weights in WITH_ENTMAX:
        return "adasplash" if device.type == "cuda" and is_installed() else "blockwise"
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
    """Returns the dtype of the model's first floating-point parameter, None if it has none."""
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)


def model_record(opened: Opened, prepared: Prepared, session: Session | None) -> ModelRecord:
    """Returns the `ModelRecord` of a finished run; `session` is None for an encoder-decoder model."""
    model, source, options = opened.model, opened.source, opened.options
    config = text_config(getattr(model, "config", None))
    facts = model_facts(config, str(opened.folder) if opened.folder else None, model) | {"format": opened.format}
    if opened.attention is not None:
        facts["attention"] = opened.attention
    if options.training_length:
        facts["training_length_tokens"] = options.training_length
    return ModelRecord(
        **facts | gpu_facts(opened.device),
        name=Path(source).name if source else type(model).__name__,
        inputs=(_read(lambda: opened_parts(opened)) or {}) if source else {},
        kernels=kernels_in_use(model, options.kernels, opened.device),
        skip_threshold=prepared.skip_threshold,
        unread=opened.unread.to_json(),
        max_length=opened.max_length,
        command=recorded_command(),
        versions=versions(),
        thinking_tokens=options.thinking_tokens,
        added_tokens=added_to_texts(opened),
        prepared=prepared.to_json(),
        **(_session_facts(session) if session is not None else {}),
    )


def _session_facts(session: Session) -> dict[str, Any]:
    """Returns the fields of a `ModelRecord` that are known only after requests were answered."""
    extrapolation, self_test = session.rope.extrapolation, session.self_test
    return {
        "rope_scaling": session.rope.in_force,
        "extrapolation": extrapolation.to_json() if extrapolation else None,
        "tokens_per_second": session.meter.tokens_per_second,
        "generated": dataclasses.asdict(session.tally) if session.tally.answers else None,
        "self_test": self_test.to_json() if self_test.model else None,
        "cache": dict(session.cache_facts) if session.cache_facts else None,
    }


def model_facts(config: Any, folder: str | None, model: Any) -> dict[str, Any]:
    """Fills the fields of a `ModelRecord` from config.json, the checkpoint's folder and the loaded model."""
    is_ours = getattr(config, "model_type", None) == "sbeval"
    by_name = getattr(config, "_attn_implementation", None) == STICKBREAKING
    recipe, training_seed = _training(folder)
    facts: dict[str, Any] = {
        "format": checkpoint_format(config),
        "checkpoint_sha256": _read(lambda: weights_sha256(Path(folder))) if folder else None,
        "training_length_tokens": training_length_tokens(config),
        "declared_length_tokens": declared_length_tokens(config),
        "extended_from": extended_from(config),
        "attention": config.scheme if is_ours else STICKBREAKING if by_name else getattr(config, "model_type", None),
        "sliding_window": positive(getattr(config, "sliding_window", None)),
        "remainder": config.remainder if is_ours else None,
        "head_norm": config.head_norm if is_ours else None,
        "recipe": recipe,
        "training_seed": training_seed,
    }
    if not isinstance(model, nn.Module):
        return facts
    dtype = dtype_of(model)
    facts["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    return facts | {"dtype": str(dtype).removeprefix("torch.") if dtype else None}


def gpu_facts(device: torch.device) -> dict[str, Any]:
    """Returns the GPU's name and the peak memory of all GPUs in bytes; nothing for a CPU."""
    if device.type != "cuda":
        return {}
    allocated = map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))
    return {"gpu": torch.cuda.get_device_name(device), "peak_memory_bytes": sum(allocated) or None}


def opened_parts(opened: Opened) -> Parts:
    """Returns the parts of the fingerprint of an `Opened` model, as `model_parts` does."""
    return model_parts(opened.source, opened.arguments, model=opened.model, tokenizer=opened.tokenizer)


def model_parts(source: str | None, arguments: Mapping[str, Any], *, model: Any, tokenizer: Any) -> Parts:
    """Returns the parts of a model's fingerprint: content hashes of checkpoint, adapters and tokenizer by name.

    Hashes are those of files, or of the tensors if the model is in memory.

    Args:
        source: the folder or hub id that the model was loaded from, None for a model in memory.
        arguments: the arguments of `hf` that the model was loaded with.
        model: the loaded model.
        tokenizer: its tokenizer.
    """
    subfolder, revision = arguments.get("subfolder") or "", str(arguments.get("revision", "main"))
    if source is not None:
        parts = checkpoint_parts(source, revision=revision, subfolder=subfolder)
    else:
        parts = {"weights": _tensors_sha256(model)}
        for name in ("config", "generation_config"):
            settings = getattr(model, name, None)
            saved_settings = settings.to_dict() if settings else {}
            saved_settings.pop("_name_or_path", None)
            parts[f"{name}.json"] = short_sha256(json.loads(json.dumps(saved_settings, default=str)))
    for name in ("peft", "delta"):
        if adapter := arguments.get(name):
            parts |= named(name, checkpoint_parts(adapter, revision=revision))
    named_tokenizer = arguments.get("tokenizer")
    if isinstance(named_tokenizer, str):
        parts |= named("tokenizer", checkpoint_parts(named_tokenizer, revision=revision, subfolder=subfolder))
    elif named_tokenizer is not None or source is None:
        parts["tokenizer"] = shortened(tokenizer_sha256(tokenizer))
    return parts


def check_cache(database: Any, session: Session) -> None:
    """Checks that a response cache was made with the session's settings.

    Raises:
        UserError: it was made with other settings, or the run uses context or tensor parallelism.
    """
    opened = session.opened
    # every rank has a cache of its own, which would lack the answers of the other ranks
    if opened.shares_model or opened.options.context_parallel > 1:
        shares = "tp_plan" if opened.shares_model else "context_parallel"
        raise UserError(f"--use_cache does not work with {shares}: leave one of them out.")
    # releases without template_suffix read the suffix as hf does
    stamp(database, run_settings(session), unrecorded={"template_suffix": "keep" if _adds_suffix(opened) else "drop"})


def stamp(database: Any, settings: Mapping[str, Any], *, unrecorded: Mapping[str, Any] | None = None) -> None:
    """Writes the settings into an empty response cache, an `SqliteDict`, or compares them with those of a used one.

    Args:
        database: the response cache.
        settings: JSON values by name; the entry `inputs` holds the parts of the model's fingerprint.
        unrecorded: values of settings that an earlier release used but did not record.

    Raises:
        UserError: the cache was made with other settings or inputs, by an earlier version or by another kind of model.
    """
    expected = json.loads(json.dumps(settings))
    # atomic: one SQL statement tests and writes, so that two processes that start together cannot both stamp the cache
    insert = "INSERT INTO {0} SELECT ?, ? WHERE NOT EXISTS (SELECT 1 FROM {0})"
    database.conn.execute(insert.format(f'"{database.tablename}"'), (STAMP_KEY, database.encode(expected)))
    if (stored := database.get(STAMP_KEY)) is None or _INPUTS not in stored:
        wanted = "Expected a response cache made by this version of the model sb"
        raise UserError(f"{wanted}, found one without its settings: name another file with --use_cache.")
    stored = {**(unrecorded or {}), **stored}
    differences = [
        f"{name}={stored.get(name)!r} instead of {expected.get(name)!r}"
        for name in {**stored, **expected}
        if stored.get(name) != expected.get(name) and name != _INPUTS
    ]
    if changed := changes(stored[_INPUTS], expected[_INPUTS]):
        differences.append(f"other inputs ({changed})")
    if differences:
        raise UserError(
            f"Expected a response cache made with this run's settings, found one made with {', '.join(differences)}: "
            "use the same settings and inputs, or name another file with --use_cache."
        )


def run_settings(session: Session) -> dict[str, Any]:
    """Returns the settings that answers depend on, as JSON values by name, with the model's fingerprint as `inputs`.

    Raises:
        UserError: a file of the checkpoint cannot be read.
    """
    opened, rope = session.opened, session.rope
    with explaining_load_errors(opened.source, "files that can be read for --use_cache"):
        parts = opened_parts(opened)
    options, model, mixed = opened.options, opened.model, opened.mixed_precision_dtype
    passed = {name: _json_ready(value) for name, value in sorted(opened.arguments.items()) if name not in APART}
    return {
        _INPUTS: versions() | parts,
        "device": opened.device.type,
        "dtype": str(model.dtype),
        "mixed_precision_dtype": str(mixed) if mixed else None,
        "rope_scaling": dict(rope.in_force) if rope.in_force else None,
        "extrapolation": str(rope.extrapolation) if rope.extrapolation else None,
        "kernels": kernels_in_use(model, options.kernels, opened.device),
        **{name: getattr(options, name) for name in _OF_OPTIONS},
        "skip_threshold": session.prepared.skip_threshold,
        **{name: getattr(opened, name) for name in _OF_OPENED},
        "self_test": session.self_test.ways(),
        "cache": session.cache.facts() if session.cache else None,
        "arguments": passed,
        # without a suffix of the tokenizer both values give the same answers
        "template_suffix": options.template_suffix if _adds_suffix(opened) else "drop",
        # with thinking, the cache stores facts, such as the number of thinking tokens, with the answers
        **({} if options.thinking_tokens is None else {"answers_with_facts": True}),
    }


def _adds_suffix(opened: Opened) -> bool:
    """Whether the tokenizer adds tokens, such as EOS, behind the texts of this run."""
    return bool((added_to_texts(opened) or {}).get("suffix"))


def _json_ready(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__))


def _read(files: Callable[[], T]) -> T | None:
    """Returns the result of a function that reads files, None if they are gone, so that a finished run is recorded."""
    try:
        return files()
    except OSError:
        return None


def _training(pretrained: str | None) -> tuple[str | None, int | None]:
    """Returns recipe name and seed from the training record in a checkpoint's folder, None and None without one."""
    try:
        recipe = read_json_object(Path(pretrained or "") / "training_record.json", "the record of a training")["recipe"]
        name, seed = recipe["name"], recipe["seed"]
    except (UserError, KeyError, TypeError):
        return None, None
    return (name, seed) if fits(name, str) and fits(seed, int) else (None, None)


def _tensors_sha256(model: nn.Module) -> str:
    """Returns a hash of the name, shape, dtype and values of every tensor in the state dict of a model in memory."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(values)
    return shortened(digest.hexdigest())
