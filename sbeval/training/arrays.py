"""Loads token arrays from disk: training tokens, recall text, and the record of their source."""

from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np

from sbeval.errors import UserError, brief, first_line
from sbeval.fingerprint.checkpoint import checkpoint_parts
from sbeval.fingerprint.parts import Parts, named, shortened
from sbeval.foreign_files import fits, read_json_object
from sbeval.keeping.hashes import file_sha256
from sbeval.training.tokenizer import Tokens


class TrainingArrays(NamedTuple):
    """Memory-mapped token arrays, with the record of their source.

    Attributes:
        tokens: all documents, each followed by the end-of-text token; [tokens].
        recall: windows of recall text (synthetic text in which the model must find earlier values), [windows,
            length + 1]; empty for a user's own text.
        record: content of `record.json`: source, hashes and counts.
        tokenizer: folder of the tokenizer that made the arrays.
    """

    tokens: Tokens
    recall: Tokens
    record: dict[str, Any]
    tokenizer: Path


def load_arrays(folder: Path) -> TrainingArrays:
    """Memory-maps the token arrays in a folder.

    Raises:
        UserError: a file is missing, damaged, or of another type or shape.
    """
    arrays = []
    for name, dimensions in (("tokens.npy", 1), ("recall.npy", 2)):
        remedy = "give text with --text, or a folder of token arrays"
        if not (folder / name).is_file():
            raise UserError(f"{folder} holds no token arrays: {name} is missing; {remedy}")
        try:
            array = np.load(folder / name, mmap_mode="r")
        except (ValueError, EOFError, OSError, SyntaxError, TypeError, OverflowError, TokenError) as error:
            raise UserError(
                f"{folder / name} cannot be read as a NumPy array ({first_line(error)}); {remedy}"
            ) from error
        if not isinstance(array, np.ndarray) or array.ndim != dimensions or array.dtype.kind not in "ui":
            is_array = isinstance(array, np.ndarray)
            description = f"{array.ndim} dimension(s) of {array.dtype}" if is_array else "no array"
            raise UserError(
                f"Expected an integer array with {dimensions} dimension(s) in {folder / name}, found {description}; "
                f"{remedy}"
            )
        arrays.append(array)
    record = read_json_object(folder / "record.json", "the record of token arrays", remedy="tokenise the text again")
    for key, kind in (("tokens_sha256", str), ("unique_tokens", int)):
        if not fits(record.get(key), kind):
            raise UserError(
                f"Expected {key} in {folder / 'record.json'} to be of type {kind.__name__}, found "
                f"{brief(record.get(key))}; tokenise the text again"
            )
    return TrainingArrays(tokens=arrays[0], recall=arrays[1], record=record, tokenizer=folder / "tokenizer")


def arrays_parts(folder: Path) -> Parts:
    """Returns the fingerprint of token arrays: hashes of both arrays and of the tokenizer.

    The fingerprint is empty if the path holds text instead of token arrays.
    """
    if not (folder / "tokens.npy").is_file():
        return {}
    arrays = {name: shortened(file_sha256(folder / name)) for name in ("tokens.npy", "recall.npy")}
    return arrays | named("tokenizer", checkpoint_parts(str(folder / "tokenizer")))
