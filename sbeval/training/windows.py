"""Which tokens a training step sees: a pure function of the data, the seed and the step."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from sbeval.errors import UserError
from sbeval.training.tokenizer import Tokens


class TrainingWindows(Dataset[Tensor]):
    """All windows of a training run in the order they are seen.

    Item i is the same for every model trained with the same data, seed and length. A share of the items, evenly
    spread, is recall text; the others cut the joined documents into windows at an offset drawn for each epoch and
    visit them in an order drawn for each epoch.

    `recall` is [rows, row length + 1], of a row length that divides `length_tokens`: as many rows as fit make a window,
    and it is used from the start again when it runs out. `length_tokens` are model inputs; a window holds one more.
    `tokens` are the joined documents.
    """

    def __init__(
        self, tokens: Tokens, recall: Tokens, *, length_tokens: int, windows: int, recall_share: float = 0.0, seed: int
    ) -> None:
        # one offset less than a window keeps the number of windows the same in every epoch
        self.windows_per_epoch = (len(tokens) - length_tokens) // length_tokens
        if self.windows_per_epoch < 1:
            raise UserError(
                f"Expected at least {2 * length_tokens} training tokens for windows of {length_tokens}, "
                f"found {len(tokens)}; prepare more text or train at a shorter length"
            )
        row_tokens = recall.shape[1] - 1 if recall_share > 0 else length_tokens
        self._rows_per_recall_window = rows = length_tokens // max(1, row_tokens)
        if length_tokens != rows * row_tokens or (recall_share > 0 and len(recall) < rows):
            raise UserError(
                f"Expected recall windows of {length_tokens + 1} tokens for recall_share {recall_share}, found shape "
                f"{list(recall.shape)}; tokenise the data again with --length {length_tokens}"
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
        """How often the joined documents are seen over all items."""
        return (self._windows - self._recall_before(self._windows)) / self.windows_per_epoch

    def visited(self) -> Iterator[Tokens]:
        """Yields what the run reads of the joined documents, in stretches; all of them from one epoch on."""
        if self.epochs >= 1:
            yield self.tokens
            return
        self._enter(0)
        for place in self._order[: self._windows - self._recall_before(self._windows)].tolist():
            start = self._offset + place * self._length_tokens
            yield self.tokens[start : start + self._length_tokens + 1]

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
        return self.tokens[start : start + self._length_tokens + 1]

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
