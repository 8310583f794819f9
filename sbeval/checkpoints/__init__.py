"""Every checkpoint format this project reads, found by looking at the files.

What a folder's files state is asked before any model is loaded, so importing this package imports no torch: the public
names below are resolved when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sbeval.checkpoints.convert import convert_checkpoint, settle_kv_expand
    from sbeval.checkpoints.files import check_shards
    from sbeval.checkpoints.load import (
        LoadedCheckpoint,
        load_checkpoint,
        load_whole,
        register_fla_models,
        released_format,
        training_length_tokens,
    )

__all__ = [
    "LoadedCheckpoint",
    "check_shards",
    "convert_checkpoint",
    "load_checkpoint",
    "load_whole",
    "register_fla_models",
    "released_format",
    "settle_kv_expand",
    "training_length_tokens",
]
_ELSEWHERE = {"check_shards": "files", "convert_checkpoint": "convert", "settle_kv_expand": "convert"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sbeval.checkpoints' has no attribute {name!r}")
    return getattr(importlib.import_module(f"sbeval.checkpoints.{_ELSEWHERE.get(name, 'load')}"), name)
