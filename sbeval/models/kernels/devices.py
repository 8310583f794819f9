"""Checks on which devices Triton kernels run, and wraps PyTorch kernels that some builds or GPUs do not support."""

import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def runs_triton(tensor: Tensor) -> bool:
    """Whether a Triton kernel can run on the tensor: on a GPU, or anywhere in Triton's interpreter.

    False inside `torch.compile`, which fuses the plain PyTorch code itself.
    """
    if torch.compiler.is_compiling():
        return False
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def is_hopper(tensor: Tensor) -> bool:
    """Whether the tensor is on an H100 or H200, for which the choice of kernels was tuned."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) == (9, 0)


class OptionalKernel:
    """A kernel with a fallback: after its first failure, it logs a warning and is not tried again.

    The warning has the kernel's `name` and ends with `instead`, which says what replaces it.
    """

    def __init__(self, name: str, instead: str) -> None:
        self.works = True
        self._name, self._instead = name, instead

    def attempt(self, run: Callable[[], Tensor]) -> Tensor | None:
        """Returns `run()`, or None if the kernel fails now or has failed before. Raises out-of-memory errors."""
        if not self.works:
            return None
        try:
            return run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers and kernels raise errors of any class, and the caller has a fallback
            self.works = False
            reason = str(error).strip().partition("\n")[0]
            logger.warning("%s does not run here (%s): %s", self._name, reason, self._instead)
            return None
