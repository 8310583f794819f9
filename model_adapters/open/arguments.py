"""Checks the model's arguments: most of them before torch is imported, the others at the start of loading."""

import contextlib
import logging
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from sbeval.checkpoints.argument_names import harness_arguments, names_of_a_checkpoint
from sbeval.checkpoints.facts import refuse_adapter
from sbeval.errors import UserError, brief
from sbeval.foreign_files import has_tokenizer_files
from sbeval.hub_names import config_of_hub, is_hub_id, is_on_the_hub, local_path, looks_like_path
from sbeval.model_adapters.options import SOURCE, AdapterOptions
from sbeval.results.records import LABEL
from sbeval.settings import Count, Flag, Tokens, read_value

logger = logging.getLogger(__name__)

Backend = Literal["default", "causal", "seq2seq"]
# the names of torch's dtypes, written out so that checking them needs no import of torch
DTYPES = frozenset(
    {
        *("auto", "float16", "half", "bfloat16", "float32", "float", "float64", "double"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "float4_e2m1fn_x2",
    }
)
_OF_HF: dict[str, Any] = {"max_length": Tokens | None, "backend": Backend | None, "parallelize": Flag | None}
_OF_HF["attn_implementation"] = str | Mapping[str, Any] | None
_LEAST_LIKENESS = 0.85
_LIKENESS = 0.7  # how similar a name must be to be suggested; low, since the model is known not to read the name


def check_early(arguments: Mapping[str, Any], *, batch_size: Any = None) -> None:
    """Makes the checks that do not import torch: types and names of arguments, and whether the checkpoint exists.

    Raises:
        UserError: an argument is wrong; the message names it, with the allowed values and the value found.
    """
    remaining = dict(arguments)
    AdapterOptions.pop(remaining)
    check_dtypes(remaining)
    _refuse_quantisation(remaining)
    _check_batch_size(1 if batch_size is None else batch_size)
    refuse_command_options(remaining, ("device", "batch_size", "max_batch_size"))
    for key, kind in _OF_HF.items():
        read_value(kind, remaining.get(key), name=key, source=SOURCE)
    _name_subfolder(remaining)
    for key in ("pretrained", "tokenizer", "peft", "delta"):
        if remaining.get(key) is not None and not isinstance(remaining[key], str):
            raise UserError(f"Expected {key} to be a folder or a hub id, found {brief(remaining[key])}: correct it.")
    if isinstance(revision := remaining.get("revision"), list | Mapping):
        raise UserError(f"Expected revision to be a branch, a tag or a commit, found {brief(revision)}: correct it.")
    if (name := remaining.get("pretrained")) is None:
        similar_names = [key for key in remaining if key.startswith("pre")]
        expected = "Expected pretrained=CHECKPOINT in --model_args"
        raise UserError(
            f"{expected}, found {similar_names[0] if similar_names else 'none'}: name a folder or a hub id."
        )
    folder = local_path(name)
    inside = folder / str(remaining.get("subfolder") or "")
    check_names(remaining)
    if (inside / "checkpoint" / "config.json").is_file() and not (inside / "config.json").exists():
        raise UserError(
            f"Expected a checkpoint at pretrained={name}, found the folder of a training: name {inside / 'checkpoint'}."
        )
    refuse_adapter(inside)
    elsewhere = remaining.get("tokenizer") or remaining.get("gguf_file")
    if (inside / "config.json").is_file() and not elsewhere and not has_tokenizer_files(inside):
        raise UserError(
            f"Expected a tokenizer beside the model in {inside}, found none of its files, such as tokenizer.json: save "
            f"it there, or name one with tokenizer=... in {SOURCE}."
        )
    if folder.exists():
        return
    # `owner/name` may be a hub id: if a folder `owner` exists here, it is a misspelt path unless the hub has that id
    folder_of_that_name = "/" in name and Path(name).parent.is_dir()
    if looks_like_path(name) or (folder_of_that_name and not is_on_the_hub(name, remaining)):
        raise UserError(
            f"Expected a model at pretrained={name}, but there is no such folder: {name}: correct the path."
        )


def refuse_command_options(arguments: Mapping[str, Any], options: Iterable[str] = ("device", "batch_size")) -> None:
    """Refuses options of the command line among a model's arguments; any model of lm-eval would get them twice.

    Args:
        arguments: the arguments of `--model_args`.
        options: names of options. The default are those that lm-eval's command passes to every model; it passes
            `max_batch_size` only if the user does.

    Raises:
        UserError: `arguments` has one of these options.
    """
    for option in options:
        if option in arguments:
            raise UserError(
                f"{option} is an option of the command line, not a model argument: pass --{option} instead of "
                f"{option}={brief(arguments[option])}."
            )


def check_names(arguments: Mapping[str, Any], *, of_hf: bool = False) -> None:
    """Refuses misspelt arguments, and arguments that are read neither by `hf` nor by the checkpoint's model class.

    If `of_hf`, the arguments are those of lm-eval's model `hf`, which has none of `AdapterOptions`.

    Raises:
        UserError: nothing reads an argument; the message names it, with a similar name if there is one.
    """
    known = harness_arguments()
    names = sorted({*known} if of_hf else {*known, *AdapterOptions.model_fields})
    unknown = [key for key in arguments if key not in known]
    of_model = names_of_a_checkpoint(_folder_of_config(arguments)) if unknown else None
    for key in unknown:
        if key in (of_model or ()):
            continue
        if similar_names := get_close_matches(
            key, names, n=1, cutoff=_LEAST_LIKENESS if of_model is None else _LIKENESS
        ):
            raise UserError(f"Expected {similar_names[0]} in {SOURCE}, found {key}: correct the name.")
        if of_model is not None and known:
            advice = "give it with --metadata" if key == LABEL else "correct the name, or remove it"
            readers = "lm-eval's hf" if of_hf else "the model sb, lm-eval's hf"
            raise UserError(
                f"{SOURCE} contains {key}, which neither {readers} nor the checkpoint's model reads: {advice}."
            )


def check_hub_id(arguments: Mapping[str, Any]) -> None:
    """Refuses a hub id that neither the hub nor its local cache has, with one request.

    Raises:
        UserError: there is no such repository.
    """
    name = arguments.get("pretrained")
    if isinstance(name, str) and is_hub_id(name) and not is_on_the_hub(name, arguments):
        raise UserError(
            f"Expected a model at pretrained={name}, but {name} is no folder here, and neither the hub nor its cache "
            "on this machine has that name: correct the name, or check the network and the access rights."
        )


def _folder_of_config(arguments: Mapping[str, Any]) -> Path:
    """Returns the folder with the model's config.json: the local checkpoint's, or one in the hub's local cache."""
    name = arguments.get("pretrained")
    folder = local_path(str(name or "")) / str(arguments.get("subfolder") or "")
    if isinstance(name, str) and is_hub_id(name) and (file := config_of_hub(name, arguments)) is not None:
        return file.parent
    return folder


def _name_subfolder(arguments: dict[str, Any]) -> None:
    """Turns a `subfolder` such as 1000 back into text: lm-eval parses names that look like numbers as numbers."""
    if (name := arguments.get("subfolder")) is None:
        return
    if isinstance(name, bool) or not isinstance(name, str | int | float):
        raise UserError(f"Expected subfolder to be the name of a folder, found {brief(name)}: correct it.")
    arguments["subfolder"] = str(name)


def check_dtypes(arguments: Mapping[str, Any]) -> None:
    """Refuses dtype names that torch does not know.

    Raises:
        UserError: a dtype is unknown; the message names the argument.
    """
    for name in ("dtype", "softmax_dtype", "mixed_precision_dtype"):
        dtype = arguments.get(name)
        if isinstance(dtype, str) and dtype not in DTYPES:
            raise UserError(f"Expected {name} to be auto or a type such as bfloat16, found {brief(dtype)}: correct it.")


def _refuse_quantisation(arguments: Mapping[str, Any]) -> None:
    """Refuses `quantization_config`: `hf` reads it only from config.json, and passing it twice is a `TypeError`."""
    if "quantization_config" in arguments:
        raise UserError(
            f"{SOURCE} contains quantization_config, which lm-eval's hf reads only from the checkpoint's config.json: "
            "write it there, or remove it."
        )


def _check_batch_size(batch_size: Any) -> None:
    if not re.fullmatch(r"auto(:\d+(\.\d+)?)?|[1-9]\d*", str(batch_size)):
        raise UserError(
            f"Expected batch_size to be a positive number or auto, found {brief(batch_size)}: correct --batch_size."
        )


def check_device(device: Any) -> None:
    """Refuses a device that torch does not find; without this check, `hf` would silently use another device.

    Imports torch, unless the device is one that is never refused.

    Raises:
        UserError: there is no such device.
    """
    # lm-eval passes cuda:0 by default; on a machine without a GPU `hf` then uses the CPU
    if device is None or str(device) in ("cpu", "cuda:0"):
        return
    import torch  # only here: the checks that run before loading must not import torch

    accelerator = torch.accelerator.current_accelerator()
    device_count = 0 if accelerator is None else torch.accelerator.device_count()
    with contextlib.suppress(RuntimeError):  # torch does not know the device: the code below raises a clear error
        chosen = torch.device(str(device))
        if accelerator is not None and chosen.type == accelerator.type and (chosen.index or 0) < device_count:
            return
    kind = "accelerators" if accelerator is None else f"{accelerator.type} devices"
    expected = "Expected an existing device, such as cpu or cuda:0"
    raise UserError(f"{expected}, found {brief(device)} with {device_count} {kind}: correct --device.")


def check_shared_arguments(arguments: dict[str, Any], options: AdapterOptions) -> None:
    """Checks arguments for which `hf` makes no check or fails with a traceback; converts numbers in `arguments`.

    Args:
        arguments: the arguments of `hf`.
        options: the adapter's own arguments, some of which exclude arguments of `hf`.

    Raises:
        UserError: an argument is wrong; the message names it, with the allowed values and the value found.
    """
    import torch  # only here, as in `check_device`

    check_dtypes(arguments)
    _refuse_quantisation(arguments)
    _name_subfolder(arguments)
    if arguments.get("softmax_dtype") not in (None, "float32", torch.float32):
        logger.warning("softmax_dtype is not used: log-probabilities are computed in float32 and added in float64")
    check_device(arguments.get("device"))
    if options.thinking_tokens is not None:
        if arguments.get("enable_thinking") not in (None, True):
            raise UserError(
                f"thinking_tokens does not work with enable_thinking={brief(arguments['enable_thinking'])}: leave one "
                "of them out."
            )
        arguments.pop("enable_thinking", None)  # `open` sets it after loading, since it depends on the tokenizer
    elif arguments.get("enable_thinking") and arguments.get("think_end_token") is None:
        raise UserError("enable_thinking=True needs think_end_token: name it in --model_args.")
    shared = [name for name in ("tp_plan", "parallelize") if arguments.get(name)]
    shared += ["context_parallel"] * (options.context_parallel > 1)
    if len(shared) > 1:
        raise UserError(f"Expected {shared[0]} or {shared[1]} in --model_args, found both: leave one of them out.")
    _check_batch_size(arguments.get("batch_size", 1))
    for name, kind in (("max_length", Tokens), ("max_batch_size", Count)):
        if arguments.get(name) is not None:
            arguments[name] = read_value(kind, arguments[name], name=name, source=SOURCE)
    for name, file in (("peft", "adapter_config.json"), ("delta", "config.json")):
        folder = arguments.get(name)
        is_path = isinstance(folder, str) and (folder.startswith(("/", ".", "~")) or Path(folder).is_dir())
        if is_path and not (Path(str(folder)) / file).is_file():
            raise UserError(
                f"Expected a folder with {file} at {name}={folder}, found none: correct the path in --model_args."
            )
        weights = Path(str(folder)) / "adapter_model.safetensors"
        # a FIFO would block the reader for ever
        if is_path and name == "peft" and weights.exists() and not weights.is_file():
            raise UserError(f"Expected weights at {str(weights)!r}, found no regular file: copy the adapter again.")
