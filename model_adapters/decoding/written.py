"""New tokens of all slots, on their way from the device to the host.

Shape suffixes: B slots, M most tokens since the last look.
"""

import torch
from torch import Tensor

from sbeval.scoring.non_finite import NEVER, FiniteWatch


class Written:
    """Tokens written since the last look, on their way to the host."""

    def __init__(self, written_BM: Tensor, count_B: Tensor, goes_on_B: Tensor, watch: FiniteWatch) -> None:
        columns = (count_B, goes_on_B, watch.first_B)
        whole = torch.cat([written_BM, *(column[:, None] for column in columns)], dim=1)
        self._arrived: torch.cuda.Event | None = None
        self._table: list[list[int]] | None = None
        self._whole = whole
        if whole.is_cuda:
            self._whole = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True).copy_(whole, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(whole.device))

    def of(self, slot: int) -> tuple[list[int], bool, int | None]:
        """Returns a slot's new tokens, whether its text goes on, and how many tokens precede NaN or infinite logits.

        The last is None if there were no such logits. Waits for the device.
        """
        if self._table is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._table = self._whole.tolist()
        *tokens, count, goes_on, first = self._table[slot]
        return tokens[:count], bool(goes_on), None if first == NEVER else first
