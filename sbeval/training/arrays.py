"""Token arrays on disk: tokens, recall text, and the record of where they come from."""

from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np

from sbeval.errors import UserError, first_line, shown
from sbeval.fingerprint.checkpoint import checkpoint_parts
from sbeval.fingerprint.parts import Parts, named, shortened
from sbeval.foreign_files import fits, read_json_object
from sbeval.keeping.hashes import file_sha256
from sbeval.training.tokenizer import Tokens


class TrainingArrays(NamedTuple):
    """Token arrays on disk, as `own_text` writes them, and where their text comes from.

    `tokens` are documents joined with the end-of-text token, `recall` is [windows, length + 1].
    """

    tokens: Tokens
    recall: Tokens
    record: dict[str, Any]
    tokenizer: Path


def load_arrays(folder: Path) -> TrainingArrays:
    """Maps the arrays into memory.

    Raises:
        UserError: the folder is not one of token arrays.
    """
    arrays = []
    for name, dimensions in (("tokens.npy", 1), ("recall.npy", 2)):
        remedy = "give text with --text, or the folder of such arrays"
        if not (folder / name).is_file():
            raise UserError(f"Expected token arrays in {folder}, found no {name}; {remedy}")
        try:
            array = np.load(folder / name, mmap_mode="r")
        except (ValueError, EOFError, OSError, SyntaxError, TypeError, OverflowError, TokenError) as error:
            raise UserError(f"expected an array of tokens in {folder / name}, {first_line(error)}; {remedy}") from error
        if not isinstance(array, np.ndarray) or array.ndim != dimensions or array.dtype.kind not in "ui":
            shape = f"{array.ndim} of {array.dtype}" if isinstance(array, np.ndarray) else "none"
            raise UserError(
                f"Expected an array of whole numbers with {dimensions} dimensions in {folder / name}, found {shape}; "
                f"{remedy}"
            )
        arrays.append(array)
    record = read_json_object(folder / "record.json", "the record of token arrays", remedy="tokenise the text again")
    for key, kind in (("tokens_sha256", str), ("unique_tokens", int)):
        if not fits(record.get(key), kind):
            raise UserError(
                f"Expected {key} in {folder / 'record.json'} to be of type {kind.__name__}, found "
                f"{shown(record.get(key))}; tokenise the text again"
            )
    return TrainingArrays(tokens=arrays[0], recall=arrays[1], record=record, tokenizer=folder / "tokenizer")


def arrays_parts(folder: Path) -> Parts:
    """Returns the parts of token arrays by content, none for a folder or file of text."""
    if not (folder / "tokens.npy").is_file():
        return {}
    arrays = {name: shortened(file_sha256(folder / name)) for name in ("tokens.npy", "recall.npy")}
    return arrays | named("tokenizer", checkpoint_parts(str(folder / "tokenizer")))
