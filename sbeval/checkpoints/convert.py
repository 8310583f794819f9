"""Converts a checkpoint of another format to the sbeval format."""

import shutil
from pathlib import Path

import torch

from sbeval.checkpoints.facts import KvExpand
from sbeval.checkpoints.load import LoadedCheckpoint, load_checkpoint
from sbeval.errors import UserError
from sbeval.keeping.writing import is_new, set_aside, written_beside
from sbeval.models import SbevalForCausalLM

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


def convert_checkpoint(
    source: str | Path,
    destination: Path,
    *,
    dtype: torch.dtype | str = "auto",
    kv_expand: KvExpand = "auto",
    revision: str | None = None,
    replace: bool = False,
) -> LoadedCheckpoint:
    """Loads a checkpoint and writes it with its tokenizer to a folder in the sbeval format.

    Args:
        source: folder or hub id of the checkpoint.
        destination: a new or empty folder, unless `replace` is set.
        dtype: as in `load_checkpoint`.
        kv_expand: as in `load_checkpoint`.
        revision: as in `load_checkpoint`.
        replace: move the files in `destination` aside instead of raising an error.

    Returns:
        The loaded checkpoint.

    Raises:
        UserError: the format cannot be converted, or the destination is not empty.
    """
    if not replace:
        _check_empty(destination)
    loaded = load_checkpoint(source, dtype=dtype, kv_expand=kv_expand, revision=revision)
    if not isinstance(loaded.model, SbevalForCausalLM):
        raise UserError(
            f"a checkpoint of the format {loaded.format} cannot be converted: only stick-breaking formats and their "
            "baselines can become sbeval models; evaluate the checkpoint without conversion"
        )
    if replace and not is_new(destination):
        set_aside(destination, reads=[] if loaded.folder is None else [loaded.folder])
    _check_empty(destination)  # check again, since loading may have taken an hour
    with written_beside(destination) as unfinished:
        loaded.model.save_pretrained(unfinished)
        for name in _TOKENIZER_FILES:
            if loaded.folder is not None and (loaded.folder / name).is_file():
                shutil.copyfile(loaded.folder / name, unfinished / name)
    return loaded


def _check_empty(destination: Path) -> None:
    if not is_new(destination):
        raise UserError(
            f"{destination} is not empty; choose a new or empty folder, or pass --replace to move its files aside"
        )
