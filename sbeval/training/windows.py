"""The token windows of a training run, in training order; they depend only on the data, the settings and the seed."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from sbeval.errors import UserError
from sbeval.training.tokenizer import Tokens


class TrainingWindows(Dataset[Tensor]):
    """All windows of a training run, in training order.

    Item i is the same for every model trained with the same data, seed and length. Some items, at even distances, are
    recall text: synthetic text in which the model must find earlier values. The other items are windows of the joined
    documents. Each epoch begins at a random offset and has a random order of windows.

    Args:
        tokens: the joined documents, [tokens].
        recall: recall text, [rows, row length + 1], with a row length that divides `length_tokens`. A window takes as
            many rows as fit; after the last row it starts again from the first.
        length_tokens: model inputs of a window; a window holds one token more.
        windows: number of items.
        recall_share: share of the items that are recall text.
        seed: seed of the offsets and orders.

    Raises:
        UserError: the text is too short for one window, or the recall rows do not fit the windows.
    """

    def __init__(
        self, tokens: Tokens, recall: Tokens, *, length_tokens: int, windows: int, recall_share: float = 0.0, seed: int
    ) -> None:
        # one window less than the text holds, so that every epoch has the same number of windows with any offset
        self.windows_per_epoch = (len(tokens) - length_tokens) // length_tokens
        if self.windows_per_epoch < 1:
            raise UserError(
                f"Windows of {length_tokens} tokens need at least {2 * length_tokens} training tokens, found "
                f"{len(tokens)}; give more text or train at a shorter length"
            )
        row_tokens = recall.shape[1] - 1 if recall_share > 0 else length_tokens
        self._rows_per_recall_window = rows = length_tokens // max(1, row_tokens)
        if length_tokens != rows * row_tokens or (recall_share > 0 and len(recall) < rows):
            raise UserError(
                f"recall_share {recall_share} needs recall windows of {length_tokens + 1} tokens, found recall.npy of "
                f"shape {list(recall.shape)}; tokenise the data again with --length {length_tokens}"
            )
        self.tokens = tokens
        self._recall, self._recall_share = recall, recall_share
        self._length_tokens, self._windows = length_tokens, windows
        self._seed = seed
        self._epoch = -1
        self._offset = 0
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def __len__(self) -> int:
        return self._windows

    @property
    def epochs(self) -> float:
        """Number of passes over the joined documents, as a fraction."""
        return (self._windows - self._recall_before(self._windows)) / self.windows_per_epoch

    def visited(self) -> Iterator[Tokens]:
        """Yields the ranges of the joined documents that the run trains on: the whole text after at least one epoch."""
        if self.epochs >= 1:
            yield self.tokens
            return
        self._enter(0)
        for window in self._order[: self._windows - self._recall_before(self._windows)].tolist():
            start = self._offset + window * self._length_tokens
            yield self.tokens[start : start + self._length_tokens + 1]

    def __getitem__(self, index: int) -> Tensor:
        """Returns window `index`: [length + 1] int64."""
        return torch.from_numpy(self._window(index).astype(np.int64))

    def __getitems__(self, indices: Sequence[int]) -> Tensor:
        """Returns several windows at once: [len(indices), length + 1] int64."""
        return torch.from_numpy(np.stack([self._window(index) for index in indices]).astype(np.int64))

    def _recall_before(self, index: int) -> int:
        """Returns how many of the items before `index` are recall text."""
        return int(index * self._recall_share)

    def _window(self, index: int) -> Tokens:
        if not 0 <= index < self._windows:
            raise IndexError(f"window {index} of {self._windows}")
        recall_index = self._recall_before(index)
        if self._recall_before(index + 1) > recall_index:
            return self._recall_window(recall_index)
        epoch, window = divmod(index - recall_index, self.windows_per_epoch)
        self._enter(epoch)
        start = self._offset + int(self._order[window]) * self._length_tokens
        return self.tokens[start : start + self._length_tokens + 1]

    def _recall_window(self, index: int) -> Tokens:
        rows = self._rows_per_recall_window
        first = index % (len(self._recall) // rows) * rows
        # the last token of a row is only a target and is left out between two rows: there, the next row's first token
        # takes its place as target
        inputs = self._recall[first : first + rows, :-1].reshape(-1)
        return np.concatenate([inputs, self._recall[first + rows - 1, -1:]])

    def _enter(self, epoch: int) -> None:
        """Draws the offset and the order of windows of an epoch, unless that epoch is the current one."""
        if epoch == self._epoch:
            return
        draw = np.random.default_rng([self._seed, epoch])
        self._offset = int(draw.integers(self._length_tokens))
        self._order = draw.permutation(self.windows_per_epoch)
        self._epoch = epoch
