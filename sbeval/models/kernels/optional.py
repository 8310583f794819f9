"""Kernels of PyTorch that a build, a GPU or a shape may lack, which shows only when they are called."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class OptionalKernel:
    """A kernel that says once where it does not run, and is not tried again.

    Args:
        name: what it is called in the message.
        instead: what is done instead, as in "going text by text".

    Attributes:
        works: whether it is still tried.
    """

    def __init__(self, name: str, instead: str) -> None:
        self.works = True
        self._name, self._instead = name, instead

    def attempt(self, run: Callable[[], Tensor]) -> Tensor | None:
        """Returns what `run` does, or None where it does not run. Out-of-memory errors are passed on."""
        if not self.works:
            return None
        try:
            return run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers and kernels raise anything, and there is another way to the result
            self.works = False
            reason = str(error).strip().partition("\n")[0]
            logger.warning("%s does not run here (%s): %s", self._name, reason, self._instead)
            return None
