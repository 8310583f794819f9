"""What can be read off a loaded model and its run: format, lengths, weights' hash, the record in the results file.

The settings that answers depend on are the stamp of the response cache.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import nn

from sbeval.checkpoints import LoadedCheckpoint, checkpoint_format, text_config, training_length_tokens
from sbeval.checkpoints.facts import positive
from sbeval.checkpoints.weight_files import weights_sha256
from sbeval.errors import UserError
from sbeval.model_adapters.options import DEFAULT_SKIP_THRESHOLD, AdapterOptions
from sbeval.model_adapters.response_cache import parameters_sha256
from sbeval.results.command_line import recorded_command
from sbeval.results.records import ModelRecord

_PACKAGES = ("sbeval", "lm_eval", "torch", "triton", "transformers", "accelerate", "flash-linear-attention", "peft")


def choose_kernels(model: nn.Module, kernels: str, skip_threshold: float | Literal["auto"] | None) -> float | None:
    """Tells a model of our family how to compute its attention, and returns the threshold in force.

    Raises:
        UserError: the model has no stick-breaking attention and something was chosen for it, or a threshold was given
            for the reference, which visits every key.
    """
    config = text_config(getattr(model, "config", None))
    breaks_sticks = hasattr(model, "set_kernels") and getattr(config, "attention", "stickbreaking") == "stickbreaking"
    if skip_threshold == "auto":
        skip_threshold = DEFAULT_SKIP_THRESHOLD if breaks_sticks and kernels != "reference" else None
    elif breaks_sticks and kernels == "reference" and skip_threshold is not None:
        raise UserError(
            f"Expected no skip_threshold beside kernels=reference, which visits every key, found {skip_threshold}: "
            "remove one of them from --model_args."
        )
    if hasattr(model, "set_kernels"):
        model.set_kernels(kernels, skip_threshold)  # type: ignore[operator]
    elif kernels != "auto" or skip_threshold is not None:
        raise UserError(
            f"Expected kernels= and skip_threshold= for stick-breaking attention only, found kernels={kernels} and "
            f"skip_threshold={skip_threshold} for {checkpoint_format(getattr(model, 'config', None))}: remove them "
            "from --model_args."
        )
    return skip_threshold


def kernels_in_use(model: nn.Module, chosen: str, device: torch.device) -> str | None:
    """Returns what computes attention: our implementation's name, or transformers' for softmax attention."""
    config = text_config(getattr(model, "config", None))
    if getattr(config, "attention", None) == "stickbreaking":
        if chosen != "auto":
            return chosen
        supported = device.type == "cuda" and int(config.head_dim) <= 256 and dtype_of(model) != torch.float64
        return "triton" if supported else "blockwise"
    implementation: str | None = getattr(config, "_attn_implementation", None)
    return implementation


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """Returns the dtype of the first floating-point parameter."""
    return next((parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()), None)


def model_record(
    model: nn.Module,
    *,
    loaded: LoadedCheckpoint | None,
    pretrained: str | None,
    training_length: int | None,
    kernels: str | None,
    rope_scaling: dict[str, Any] | None,
    skip_threshold: float | None,
    max_length: int,
    device: torch.device,
    tokens_per_second: float | None,
) -> ModelRecord:
    """Returns the record of a run that has finished; `loaded` is given where transformers did not load the model."""
    config = text_config(getattr(model, "config", None))
    parameters = list(model.parameters())
    dtype = dtype_of(model)
    on_gpu = device.type == "cuda"
    own = getattr(config, "model_type", None) == "sbeval"
    stated_length = loaded.training_length_tokens if loaded else training_length_tokens(config)
    attention = config.attention if own else getattr(config, "model_type", None)
    folder = str(loaded.folder) if loaded is not None and loaded.folder is not None else pretrained
    recipe, training_seed = _training(folder)
    return ModelRecord(
        name=Path(pretrained).name if pretrained else type(model).__name__,
        format=loaded.format if loaded else checkpoint_format(config),
        checkpoint_sha256=weights_sha256(Path(folder)) if folder else None,
        training_length_tokens=training_length or stated_length,
        extended_from=getattr(config, "extended_from", None),
        attention=loaded.attention if loaded else attention,
        sliding_window=positive(getattr(config, "sliding_window", None)),
        remainder=config.remainder if own else None,
        head_norm=config.head_norm if own else None,
        recipe=recipe,
        training_seed=training_seed,
        kernels=kernels,
        rope_scaling=rope_scaling,
        skip_threshold=skip_threshold,
        dtype=str(dtype).removeprefix("torch.") if dtype else None,
        parameters=sum(parameter.numel() for parameter in parameters),
        max_length=max_length,
        command=recorded_command(),
        versions=package_versions(),
        gpu=torch.cuda.get_device_name(device) if on_gpu else None,
        peak_memory_bytes=_peak_memory_bytes() if on_gpu else None,
        tokens_per_second=tokens_per_second,
    )


def _training(pretrained: str | None) -> tuple[str | None, int | None]:
    """Returns recipe and seed from the record that `sbeval train` leaves in a checkpoint, None where there is none."""
    try:
        record = json.loads((Path(pretrained or "") / "training_record.json").read_text(encoding="utf-8"))
        return str(record["recipe"]["name"]), int(record["recipe"]["seed"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def package_versions() -> dict[str, str]:
    """Returns the versions of the installed packages that results depend on."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _peak_memory_bytes() -> int:
    return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))


HASH_CHARACTERS = 16
# what separates tokenizers of one vocabulary: BOS, normalisation, spaces, digits, merges
PROBE = "  The café's 1234567 tokens,\n\n\tthe UNUSUAL ones: \U0001f600 <s></s>"
# arguments that answers do not depend on, or that have a setting of their own
APART = {
    *("batch_size", "max_batch_size", "device", "parallelize", "max_memory_per_gpu", "max_cpu_memory"),
    *("offload_folder", "logits_cache", "trust_remote_code", "tokenizer", "revision", "subfolder", "dtype"),
    *("mixed_precision_dtype", "peft", "delta", "max_length", "add_bos_token", "prefix_token_id", "think_end_token"),
}
# keys of a configuration that answers do not depend on, or that have a setting of their own
ELSEWHERE = {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation"}


def run_settings(
    lm: Any, options: AdapterOptions, rope_scaling: Mapping[str, Any] | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the settings by name, JSON-ready.

    Args:
        lm: lm-eval's Hugging Face model, loaded.
        options: our own arguments.
        rope_scaling: the scaling in force.
        arguments: those of `hf` as they were given, such as a quantisation or a `gguf_file`.
    """
    subfolder = arguments.get("subfolder") or ""
    if isinstance(lm.pretrained, str):
        commit = _commit(lm.pretrained, f"{subfolder}/config.json".lstrip("/"), lm.revision) or lm.revision
        folder = lm.loaded.folder if lm.loaded is not None else Path(lm.pretrained) / subfolder
        model = _weights(str(folder)) or f"{lm.pretrained}/{subfolder}@{commit}"
    else:
        model = parameters_sha256(lm.model)[:HASH_CHARACTERS]
    return {
        "model": model,
        "configuration": _sha256(_configuration(lm.model.config)),
        "tokenizer": _sha256(str((sorted(lm.tokenizer.get_vocab().items()), lm.tokenizer(PROBE)["input_ids"]))),
        "dtype": str(lm.model.dtype),
        "mixed_precision_dtype": str(lm.mixed_precision_dtype) if lm.mixed_precision_dtype else None,
        "peft": _named(lm.peft, "adapter_config.json", lm.revision) if lm.peft else None,
        "delta": _named(lm.delta, "config.json", lm.revision) if lm.delta else None,
        "max_length": lm.max_length,
        "training_length": options.training_length,
        "rope_scaling": dict(rope_scaling) if rope_scaling else None,
        "kernels": kernels_in_use(lm.model, options.kernels, lm.device),
        "skip_threshold": lm.skip_threshold,
        "kv_expand": options.kv_expand,
        "truncation": options.truncation,
        "add_bos_token": lm.add_bos_token,
        "prefix_token_id": lm.prefix_token_id,
        "think_end_token": lm.think_end_token,
        "arguments": {name: _json_ready(value) for name, value in sorted(arguments.items()) if name not in APART},
    }


def _named(name: str, file: str, revision: str) -> str:
    """Returns what tells an adapter from others: its weights' hash, or its hub id with the commit where it is known."""
    if weights := _weights(name):
        return weights
    commit = _commit(name, file, revision)
    return f"{name}@{commit}" if commit else name


def _commit(name: str, file: str, revision: str) -> str | None:
    """Returns the commit behind a revision of a hub id, which may be a branch that moves; None for anything else."""
    with contextlib.suppress(HFValidationError):
        kept = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(kept, str) and (found := re.search(r"/snapshots/([^/]+)/", Path(kept).as_posix())):
            return found[1]
    return None


def _weights(folder: str) -> str | None:
    digest = weights_sha256(Path(folder))
    return digest[:HASH_CHARACTERS] if digest else None


def _json_ready(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__))


def _configuration(config: Any) -> str:
    kept = {name: value for name, value in config.to_dict().items() if name not in ELSEWHERE}
    return json.dumps(kept, sort_keys=True, default=str)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]
