"""Every checkpoint format this project reads, found by looking at the files."""

from sbeval.checkpoints.convert import convert_checkpoint, settle_kv_expand
from sbeval.checkpoints.facts import training_length_tokens
from sbeval.checkpoints.files import check_shards
from sbeval.checkpoints.load import (
    LoadedCheckpoint,
    load_checkpoint,
    load_whole,
    register_fla_models,
    released_format,
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
