"""Numbers on their way to a device, and scores on their way back.

Shape suffixes: N scored positions.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class TokenScores(NamedTuple):
    """What scoring returns, on the CPU.

    Attributes:
        logprobs: float32 [N], log-probability of each target in nats.
        greedy: bool [N], whether the target is the most probable token.
    """

    logprobs: Tensor
    greedy: Tensor


class PendingScores:
    """Scores that a device may still be computing.

    Args:
        logprobs_N: float32 [N] on the device.
        greedy_N: bool [N] on the device.
        check: called with the log-probabilities on the CPU before they are handed out; may write to them.
    """

    def __init__(self, logprobs_N: Tensor, greedy_N: Tensor, check: Callable[[Tensor], None]) -> None:
        self._check = check
        self._copied: torch.cuda.Event | None = None
        later = logprobs_N.is_cuda  # other devices say nothing of when a copy is complete
        self._scores = TokenScores(*(x.to("cpu", non_blocking=later) for x in (logprobs_N, greedy_N)))
        if later:
            with torch.cuda.device(logprobs_N.device):
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record()

    def result(self) -> TokenScores:
        """Waits for the device, for this work alone.

        Raises:
            NonFiniteError: a log-probability is not finite.
        """
        if self._copied is not None:
            self._copied.synchronize()
        self._check(self._scores.logprobs)
        return self._scores


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies whole numbers from the CPU to a device without waiting for the work a GPU has been given before."""
    if device.type == "cuda" and not tensor.is_cuda:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        pinned.numpy()[...] = tensor.numpy()
        return pinned.to(device, non_blocking=True)
    return tensor.to(device)
