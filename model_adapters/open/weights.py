"""Checks during loading: refuses arguments that a format does not take, keeps tied weights, warns of NaN in weights."""

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from sbeval.checkpoints.facts import KvExpand
from sbeval.checkpoints.registry import CheckpointFormat
from sbeval.errors import UserError
from sbeval.model_adapters.prepare.replacing import temporary_attributes
from sbeval.scoring.non_finite import non_finite_weights

logger = logging.getLogger(__name__)
# named below `lm_eval`, because lm-eval shows INFO lines of its own loggers only
format_logger = logging.getLogger("lm_eval.sbeval.checkpoints")

# arguments of `hf._create_model` that were used before the weights are loaded, or that work with every format
_SETTLED = {"revision", "dtype", "trust_remote_code", "gpus", "peft"}
_OF_PARALLELIZE = {"max_memory_per_gpu", "max_cpu_memory", "offload_folder"}  # without parallelize they have no effect


def check_kv_expand(pretrained: str, released: CheckpointFormat | None, kv_expand: KvExpand) -> None:
    """Checks that `kv_expand` is passed only for a format that leaves the layout of key/value heads open.

    Raises:
        UserError: `kv_expand` is passed for another format.
    """
    if kv_expand != "auto" and not (released and released.takes_kv_expand):
        raise UserError(
            f"kv_expand={kv_expand} is only for checkpoints of dolomite-engine, and {pretrained} is none: remove it "
            "from --model_args."
        )


def refuse_transformers_arguments(format_found: str, arguments: Mapping[str, Any], *, convertible: bool) -> None:
    """Refuses arguments of transformers' `from_pretrained` for a format that transformers does not load.

    Args:
        format_found: the checkpoint's format.
        arguments: the arguments of `_create_model` of `hf`.
        convertible: whether `sbeval convert` rewrites the format.

    Raises:
        UserError: such arguments were passed; the message names them.
    """
    refused = sorted(
        name
        for name, value in arguments.items()
        if name not in _SETTLED | _OF_PARALLELIZE and value is not None and value is not False and value != ""
    )
    if refused:
        remedy = "remove it from --model_args"
        remedy += ", or rewrite the checkpoint with `sbeval convert` first" if convertible else ""
        raise UserError(f"{', '.join(refused)} cannot be used with the checkpoint format {format_found}: {remedy}.")


def tied_as_it_is(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which `model.tie_weights()` does nothing.

    lm-eval calls `tie_weights` for every model, but loading has tied the weights before. A second call could overwrite
    trained weights: loading leaves the output matrix untied if it differs from the embeddings, even if
    `tie_word_embeddings` is true, and an adapter may have trained only one of the two matrices.
    """
    return temporary_attributes([(model, {"tie_weights": lambda *_, **__: None})])


def warn_of_weights(model: nn.Module) -> None:
    """Warns about weights that are NaN or infinite: not every answer would show the fault."""
    if names := non_finite_weights(model):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        logger.warning("the checkpoint holds NaN or infinity in %s%s: copy it again", ", ".join(names[:3]), more)


def log_format(pretrained: str, name: str) -> None:
    """Logs a checkpoint's format in one line."""
    format_logger.info("%s is a checkpoint of the format %s", pretrained, name)
