"""Training with windows that several processes hold together, each a part of the tokens.

Consecutive processes form a group and are given the same windows, each of which counts once. A process's loss is that
of its own tokens; they are equally many, so the mean of the gradients over all processes is that of the windows.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Sampler

from sbeval.attention.context_parallel import ContextParallel
from sbeval.errors import UserError
from sbeval.scoring.context_parallel import join_context
from sbeval.training.distributed import process_count


def check_context_parallel(degree: int, length_tokens: int, documents: str) -> None:
    """Checks, before anything is written, what can be shared.

    Raises:
        UserError: processes are left over, windows do not cut into equal chunks, or documents are kept apart.
    """
    if degree == 1:
        return
    if process_count() % degree:
        raise UserError(
            f"expected processes in groups of --context-parallel {degree}, found {process_count()}; start a multiple "
            f"of {degree} with `accelerate launch`"
        )
    if length_tokens % (2 * degree):
        raise UserError(
            f"expected --context to be a multiple of {2 * degree} for --context-parallel {degree}, found "
            f"{length_tokens}; change one of them"
        )
    if documents != "joined":
        raise UserError(
            f"expected --documents joined for --context-parallel {degree}, found {documents}; documents that do not "
            "see each other are short, and need no group"
        )


class EachBatchForAGroup(Sampler[int]):
    """Windows in order, each batch as often as a group has processes, which accelerate gives it to in turn.

    Args:
        windows: how many there are.
        batch_windows: of a process.
        degree: processes of a group.
    """

    def __init__(self, windows: int, batch_windows: int, degree: int) -> None:
        self._windows, self._batch_windows, self._degree = windows, batch_windows, degree

    def __iter__(self) -> Iterator[int]:
        """Yields the index of each window."""
        for start in range(0, self._windows, self._batch_windows):
            for _ in range(self._degree):
                yield from range(start, min(start + self._batch_windows, self._windows))

    def __len__(self) -> int:
        """How many indices there are."""
        return self._windows * self._degree


def shared_loss(model: Any, degree: int, device: torch.device) -> Callable[[nn.Module, Tensor], Tensor]:
    """Joins the groups and returns the loss of this process's part of windows [windows, length + 1].

    The model takes parts of windows from now on, in the backward pass too, where it may compute activations again.

    Raises:
        UserError: the model cannot be shared so, or processes hold different models.
    """
    context: ContextParallel = join_context(model, degree, device)
    context.active = True

    def loss(wrapped: nn.Module, window_tokens: Tensor) -> Tensor:
        own = context.positions(window_tokens.shape[1] - 1).to(window_tokens.device)
        logits = wrapped(input_ids=window_tokens[:, own], position_ids=own[None], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), window_tokens[:, own + 1].flatten())

    return loss
