"""Which tokens a training step sees: a pure function of the data, the seed and the step."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from sbeval.errors import UserError, first_line, shown
from sbeval.fingerprint.checkpoint import checkpoint_parts
from sbeval.fingerprint.contents import file_sha256
from sbeval.fingerprint.parts import Parts, named, shortened
from sbeval.foreign_files import fits, read_json_object
from sbeval.training.text.tokenizer import Tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingArrays:
    """Token arrays on disk, as `sbeval.training.tokenised` writes them.

    Attributes:
        tokens: [tokens] uint16 or uint32, documents joined with the end-of-text token.
        recall: [windows, length + 1] recall text.
        record: where the text comes from.
        tokenizer: folder of the tokenizer.
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
        remedy = "give text with --text, or make arrays with `python -m sbeval.training.tokenised`"
        if not (folder / name).is_file():
            raise UserError(f"expected token arrays in {folder}, found no {name}; {remedy}")
        try:
            array = np.load(folder / name, mmap_mode="r")
        except (ValueError, EOFError, OSError, SyntaxError, TypeError, OverflowError, TokenError) as error:
            raise UserError(f"expected an array of tokens in {folder / name}, {first_line(error)}; {remedy}") from error
        if not isinstance(array, np.ndarray) or array.ndim != dimensions or array.dtype.kind not in "ui":
            found = f"{array.ndim} of {array.dtype}" if isinstance(array, np.ndarray) else "none"
            raise UserError(
                f"expected an array of whole numbers with {dimensions} dimensions in {folder / name}, found {found}; "
                f"{remedy}"
            )
        arrays.append(array)
    record = read_json_object(folder / "record.json", "the record of token arrays", remedy="tokenise the text again")
    for key, kind in (("tokens_sha256", str), ("unique_tokens", int)):
        if not fits(record.get(key), kind):
            raise UserError(
                f"expected {key} in {folder / 'record.json'} to be of type {kind.__name__}, found "
                f"{shown(record.get(key))}; tokenise the text again"
            )
    return TrainingArrays(tokens=arrays[0], recall=arrays[1], record=record, tokenizer=folder / "tokenizer")


def arrays_parts(folder: Path) -> Parts:
    """Returns the parts of token arrays by content, none for a folder or file of text."""
    if not (folder / "tokens.npy").is_file():
        return {}
    arrays = {name: shortened(file_sha256(folder / name)) for name in ("tokens.npy", "recall.npy")}
    return arrays | named("tokenizer", checkpoint_parts(str(folder / "tokenizer")))


class TrainingWindows(Dataset[Tensor]):
    """All windows of a training run in the order they are seen.

    Item i is the same for every model trained with the same data, seed and length. A share of the items, evenly
    spread, is recall text; the others cut the joined documents into windows at an offset drawn for each epoch and
    visit them in an order drawn for each epoch.

    Args:
        tokens: [tokens] joined documents.
        recall: [rows, row length + 1] recall text, a row length that divides `length_tokens`: as many rows as fit make
            a window. Used from the start again when it runs out.
        length_tokens: model inputs a window; a window holds one token more.
        windows: number of items.
        recall_share: share of recall windows among the items, 0 to 1.
        seed: of offsets and order.
    """

    def __init__(
        self,
        tokens: Tokens,
        recall: Tokens,
        *,
        length_tokens: int,
        windows: int,
        recall_share: float,
        seed: int,
    ) -> None:
        # one offset less than a window keeps the number of windows the same in every epoch
        self.windows_per_epoch = (len(tokens) - length_tokens) // length_tokens
        if self.windows_per_epoch < 1:
            raise UserError(
                f"expected at least {2 * length_tokens} training tokens for windows of {length_tokens}, "
                f"found {len(tokens)}; prepare more text or train at a shorter length"
            )
        self._rows_per_recall_window = 1
        if recall_share > 0:
            self._rows_per_recall_window = length_tokens // max(1, recall.shape[1] - 1)
        if recall_share > 0 and (
            length_tokens != self._rows_per_recall_window * (recall.shape[1] - 1)
            or len(recall) < self._rows_per_recall_window
        ):
            raise UserError(
                f"expected recall windows of {length_tokens + 1} tokens for recall_share {recall_share}, found shape "
                f"{list(recall.shape)}; tokenise the data again with --length {length_tokens}"
            )
        self._tokens = tokens
        self._recall = recall
        self._length_tokens = length_tokens
        self._windows = windows
        self._recall_share = recall_share
        self._seed = seed
        self._epoch = -1
        self._offset = 0
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def __len__(self) -> int:
        return self._windows

    @property
    def epochs(self) -> float:
        """How often the joined documents are seen over all items."""
        return (self._windows - self._recall_before(self._windows)) / self.windows_per_epoch

    def __getitem__(self, index: int) -> Tensor:
        """Returns window `index`: [length + 1] int64."""
        return torch.from_numpy(self._window(index).astype(np.int64))

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        """Returns several windows at once: [len(indices), length + 1] int64."""
        return torch.from_numpy(np.stack([self._window(index) for index in indices]).astype(np.int64))

    def _recall_before(self, index: int) -> int:
        return int(index * self._recall_share)

    def _window(self, index: int) -> Tokens:
        if not 0 <= index < self._windows:
            raise IndexError(f"window {index} of {self._windows}")
        recall_index = self._recall_before(index)
        if self._recall_before(index + 1) > recall_index:
            return self._recall_window(recall_index)
        epoch, place = divmod(index - recall_index, self.windows_per_epoch)
        self._enter(epoch)
        start = self._offset + int(self._order[place]) * self._length_tokens
        return self._tokens[start : start + self._length_tokens + 1]

    def _recall_window(self, index: int) -> Tokens:
        rows = self._rows_per_recall_window
        first = index % (len(self._recall) // rows) * rows
        # a row's last token is a target only: where another row follows, that row's first token takes its place
        inputs = self._recall[first : first + rows, :-1].reshape(-1)
        return np.concatenate([inputs, self._recall[first + rows - 1, -1:]])

    def _enter(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        draw = np.random.default_rng([self._seed, epoch])
        self._offset = int(draw.integers(self._length_tokens))
        self._order = draw.permutation(self.windows_per_epoch)
        self._epoch = epoch
