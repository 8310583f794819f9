"""Checkpoints in formats that transformers does not know, in the place where lm-eval's `hf` loads a model."""

import logging
from collections.abc import Mapping
from typing import Any

from sbeval.checkpoints import LoadedCheckpoint, load_checkpoint, load_whole, released_format
from sbeval.errors import UserError
from sbeval.model_adapters.model_facts import checkpoint_format
from sbeval.model_adapters.options import KvExpand

# below lm-eval's own logger, whose level is INFO: elsewhere the line would not be seen
logger = logging.getLogger("lm_eval.sbeval.checkpoints")

# arguments of hf's `_create_model` that are settled when the checkpoint is loaded, or that work on any loaded model
_SETTLED = {"revision", "dtype", "trust_remote_code", "gpus", "peft"}
_OF_PARALLELIZE = {"max_memory_per_gpu", "max_cpu_memory", "offload_folder"}  # they mean nothing without it


class WholeFrom:
    """Stands in for one of transformers' Auto classes and refuses checkpoints that do not hold every weight."""

    def __init__(self, auto_class: Any) -> None:
        self._auto_class = auto_class

    def from_pretrained(self, pretrained: str, **arguments: Any) -> Any:
        """Returns the loaded model."""
        return load_whole(self._auto_class, pretrained, **arguments)


class InPlaceOfAutoClass:
    """Hands out a loaded model where `hf` asks transformers' Auto class for one, so that `hf` does the rest."""

    def __init__(self, loaded: LoadedCheckpoint) -> None:
        self._loaded = loaded

    def from_pretrained(self, pretrained: str, **arguments: Any) -> Any:
        """Returns the model, whose dtype, device and revision are those it was loaded with."""
        return self._loaded.model


def find_released(
    pretrained: str, *, revision: str, dtype: Any, device: Any, kv_expand: KvExpand, trust_remote_code: bool
) -> LoadedCheckpoint | None:
    """Looks for a format beyond transformers' own and loads it; None where transformers loads the checkpoint itself.

    Raises:
        UserError: the checkpoint is incomplete or not supported, or `kv_expand` is given where nothing asks for it.
    """
    found = released_format(pretrained, revision)
    if kv_expand != "auto" and found != "dolomite":
        raise UserError(
            f"Expected kv_expand= for checkpoints of dolomite-engine only, found kv_expand={kv_expand} for "
            f"{pretrained}, which is none: remove it from --model_args."
        )
    if found is None:
        return None
    return load_checkpoint(
        pretrained,
        dtype="auto" if dtype is None else dtype,
        device=device,
        kv_expand=kv_expand,
        trust_remote_code=trust_remote_code,
        revision=revision,
    )


def refuse_transformers_arguments(format_found: str, arguments: Mapping[str, Any]) -> None:
    """Checks the arguments of hf's `_create_model` for what only transformers' own loading does.

    Raises:
        UserError: naming them.
    """
    given = sorted(
        name
        for name, value in arguments.items()
        if name not in _SETTLED | _OF_PARALLELIZE and value is not None and value is not False and value != ""
    )
    if given:
        raise UserError(
            f"Expected arguments that hold for every checkpoint format, found {', '.join(given)} with the format "
            f"{format_found}: remove it from --model_args, or rewrite the checkpoint with `sbeval convert` first."
        )


def say_format(pretrained: str, config: Any, loaded: LoadedCheckpoint | None) -> None:
    """Logs which format was found, in one line."""
    name = checkpoint_format(config) if loaded is None else loaded.format
    logger.info("%s is a checkpoint of the format %s", pretrained, name)
