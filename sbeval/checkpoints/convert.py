"""Writing a released checkpoint out in this project's form, and settling how its grouped heads were laid out."""

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
    """Writes a checkpoint of any stick-breaking format to a folder in this project's form, its tokenizer beside it.

    The other options are those of `load_checkpoint`, whose answer is returned; with `replace`, what the destination
    holds is moved aside.

    Raises:
        UserError: the source cannot become a model of this family, or the destination holds something.
    """
    if not replace:
        _check_empty(destination)
    loaded = load_checkpoint(source, dtype=dtype, kv_expand=kv_expand, revision=revision)
    if not isinstance(loaded.model, SbevalForCausalLM):
        raise UserError(
            f"a checkpoint of the format {loaded.format} cannot be converted: only stick-breaking formats and their "
            "baselines have a place in this family; evaluate it as it is"
        )
    if replace and not is_new(destination):
        set_aside(destination, reads=[] if loaded.folder is None else [loaded.folder])
    _check_empty(destination)  # loading may have taken an hour
    with written_beside(destination) as unfinished:
        loaded.model.save_pretrained(unfinished)
        for name in _TOKENIZER_FILES:
            if loaded.folder is not None and (loaded.folder / name).is_file():
                shutil.copyfile(loaded.folder / name, unfinished / name)
    return loaded


def _check_empty(destination: Path) -> None:
    if not is_new(destination):
        raise UserError(
            f"Expected a new or empty folder to write to, {destination} holds something; choose another, or have it "
            "moved aside with --replace"
        )
