"""MQRAR as a dataset for a trainer: whole batches at once, fast enough for sequences never repeated.

The definition is that of `sbeval.tasks.recall.sequences`.

Shape suffixes: B sequences, S slots (pairs of tokens) of a sequence, P pairs, N keys there are, T targets.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from sbeval.tasks.recall.sequences import Mqrar


def recall_batch(setting: Mqrar, rng: np.random.Generator, sequences: int) -> dict[str, NDArray[np.int64]]:
    """Draws sequences of one setting.

    The same task as `Mqrar.sequence`, by another draw: a key's next value is its last one plus a random step, so that
    two values of a key that follow each other always differ.

    Returns:
        `input_ids` [B, 2 S], `positions` [B, T] at whose output a value is asked for, and `targets` [B, T].
    """
    slots, half, values = (
        setting.length_tokens // 2,
        setting.vocabulary // 2,
        setting.vocabulary - setting.vocabulary // 2,
    )
    drawn_BN = rng.random((sequences, half - 1), np.float32).argpartition(min(setting.pairs, half - 2), axis=1)
    names_BP = 1 + drawn_BN[:, : setting.pairs]
    in_order_BP = np.tile(np.arange(setting.pairs), (sequences, 1))
    first = [rng.permuted(in_order_BP, axis=1) for _ in range(setting.n_back)]
    asked_T = np.arange(setting.pairs * setting.n_back, slots)
    later_BT = rng.integers(setting.pairs, size=(sequences, len(asked_T)))
    keys_BS = np.concatenate([*first, later_BT], axis=1)

    # one key's slots lie side by side in this order, the oldest first
    order_BS = np.argsort(keys_BS, axis=1, kind="stable")
    new_key_BS = np.diff(np.take_along_axis(keys_BS, order_BS, 1), axis=1, prepend=-1) != 0
    steps_BS = np.where(
        new_key_BS, rng.integers(values, size=keys_BS.shape), rng.integers(1, values, size=keys_BS.shape)
    )
    sorted_values_BS = steps_BS.cumsum(axis=1) % values
    values_BS, before_BS = np.empty_like(keys_BS), np.empty_like(keys_BS)
    np.put_along_axis(values_BS, order_BS, sorted_values_BS, 1)
    np.put_along_axis(before_BS, order_BS, np.roll(sorted_values_BS, setting.n_back, axis=1), 1)

    inputs_BL = np.empty((sequences, 2 * slots), np.int64)
    inputs_BL[:, 0::2] = np.take_along_axis(names_BP, keys_BS, 1)
    inputs_BL[:, 1::2] = half + values_BS
    return {
        "input_ids": inputs_BL,
        "positions": np.broadcast_to(2 * asked_T, (sequences, len(asked_T))).copy(),
        "targets": half + before_BS[:, asked_T],
    }


class RecallBatches(Dataset[Any]):
    """Sequences that never repeat; a batch depends on the seed and the index of its first sequence alone.

    Args:
        setting: of all sequences.
        seed: evaluation uses another than training.
        count: number of sequences.
    """

    def __init__(self, setting: Mqrar, *, seed: int, count: int) -> None:
        self._setting, self._seed, self._count = setting, seed, count

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Returns a batch, already put together, as the only item of a list."""
        rng = np.random.default_rng([self._seed, indices[0]])
        batch = recall_batch(self._setting, rng, len(indices))
        return [{name: torch.from_numpy(array) for name, array in batch.items()}]
