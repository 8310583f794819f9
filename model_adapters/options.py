"""The adapter's own arguments, taken out of `--model_args` before lm-eval's Hugging Face model sees them."""

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch

from sbeval.errors import UserError
from sbeval.models.rope import parse_rope_scaling

logger = logging.getLogger(__name__)

Kernels = Literal["auto", "triton", "blockwise", "reference"]
KvExpand = Literal["auto", "interleave", "tile"]
Truncation = Literal["left", "error"]

# At 65,536 tokens this changes the NLL of the shipped checkpoint by 1e-8 nats (benchmarks/results/skipping_h200.md).
DEFAULT_SKIP_THRESHOLD = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptions:
    """Arguments of `sb` beyond those of lm-eval's `hf`.

    Attributes:
        training_length: training length in tokens, where the checkpoint does not say it or says it wrongly.
        rope_scaling: RoPE scaling at evaluation time in transformers' form; None leaves the checkpoint's own.
        kernels: what computes stick-breaking attention.
        skip_threshold: stick below which older keys are skipped; None visits every key. "auto" is
            DEFAULT_SKIP_THRESHOLD for models with stick-breaking attention, whose reference visits every key.
        max_batch_tokens: most input tokens in a batch, padding included; None chooses by device.
        kv_expand: how grouped key/value heads of released checkpoints are laid out.
        truncation: what happens to prompts that do not fit beside the generation budget: cut on the left, or an error.
    """

    training_length: int | None = None
    rope_scaling: Mapping[str, Any] | None = None
    kernels: Kernels = "auto"
    skip_threshold: float | Literal["auto"] | None = "auto"
    max_batch_tokens: int | None = None
    kv_expand: KvExpand = "auto"
    truncation: Truncation = "left"

    @classmethod
    def pop(cls, arguments: dict[str, Any]) -> Self:
        """Removes our arguments from `arguments` and returns them checked.

        Raises:
            UserError: a value is not one of those allowed.
        """
        given = {field.name: arguments.pop(field.name) for field in dataclasses.fields(cls) if field.name in arguments}
        if isinstance(given.get("truncation"), bool) or given.get("truncation", "") is None:
            given["truncation"] = "left"
        for name, allowed in (("kernels", Kernels), ("kv_expand", KvExpand), ("truncation", Truncation)):
            if name in given and given[name] not in get_args(allowed):
                raise UserError(
                    f"Expected {name} to be one of {', '.join(get_args(allowed))}, found {given[name]!r}: "
                    f"correct it in --model_args."
                )
        for name in ("training_length", "max_batch_tokens"):
            if given.get(name) is not None:
                given[name] = _positive_integer(name, given[name])
        if given.get("rope_scaling") is not None:
            given["rope_scaling"] = parse_rope_scaling(given["rope_scaling"])
        threshold = given.get("skip_threshold")
        if threshold is not None and threshold != "auto":
            if not isinstance(threshold, int | float) or not 0 <= threshold < 1:
                raise UserError(
                    f"Expected skip_threshold to lie between 0 and 1, found {threshold!r}: 0 skips nothing, 1e-5 "
                    "changes an output by at most 1e-5 of the largest value."
                )
            given["skip_threshold"] = float(threshold) or None
        return cls(**given)


def check_shared_arguments(arguments: Mapping[str, Any]) -> None:
    """Checks arguments of `hf` whose mistakes it answers with a traceback, or not at all.

    Raises:
        UserError: naming the argument, what it may be and what it is.
    """
    for name in ("dtype", "softmax_dtype", "mixed_precision_dtype"):
        dtype = arguments.get(name)
        if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise UserError(f"Expected {name} to be auto or a type such as bfloat16, found {dtype!r}: correct it.")
    if arguments.get("softmax_dtype") not in (None, "float32", torch.float32):
        logger.warning("softmax_dtype is not used: log-probabilities are computed in float32 and added in float64")
    device = re.fullmatch(r"cuda:(\d+)", str(arguments.get("device")))
    # lm-eval names cuda:0 where --device is not given, and hf takes the CPU where there is no GPU
    if device and int(device[1]) >= max(1, torch.cuda.device_count()):
        raise UserError(
            f"Expected device to be one there is, found {device[0]} with {torch.cuda.device_count()} CUDA devices: "
            "correct --device."
        )
    if arguments.get("enable_thinking") and arguments.get("think_end_token") is None:
        raise UserError("Expected think_end_token beside enable_thinking=True, found none: name it in --model_args.")
    batch_size = arguments.get("batch_size", 1)
    if not re.fullmatch(r"auto(:\d+(\.\d+)?)?|[1-9]\d*", str(batch_size)):
        raise UserError(
            f"Expected batch_size to be a positive number or auto, found {batch_size!r}: correct --batch_size."
        )
    if arguments.get("max_length") is not None:
        _positive_integer("max_length", arguments["max_length"])
    for name, file in (("peft", "adapter_config.json"), ("delta", "config.json")):
        folder = arguments.get(name)
        looks_like_path = isinstance(folder, str) and (folder.startswith(("/", ".", "~")) or Path(folder).is_dir())
        if looks_like_path and not (Path(str(folder)) / file).is_file():
            raise UserError(
                f"Expected a folder with {file} at {name}={folder}, found none: correct the path in --model_args."
            )


def _positive_integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise UserError(
            f"Expected {name} to be a positive number of tokens, found {value!r}: correct it in --model_args."
        )
    return value
