"""Which kernels run here: Triton's on a GPU, and PyTorch's where a build, a GPU or a shape may lack them."""

import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def runs_triton(tensor: Tensor) -> bool:
    """Whether a kernel can take the tensor: on a GPU, or anywhere in Triton's interpreter.

    torch.compile gets the written-out form, which it fuses itself.
    """
    if torch.compiler.is_compiling():
        return False
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def is_hopper(tensor: Tensor) -> bool:
    """Whether a tensor lies on a GPU of the kind for which kernels were tuned and chosen: an H100 or H200."""
    return tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) == (9, 0)


class OptionalKernel:
    """A kernel of PyTorch that says once, by its `name`, where it does not run, and is not tried again.

    The message tells what is done `instead`, as in "going text by text".
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
