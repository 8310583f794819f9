"""Where Triton's kernels run."""

import os

import torch
from torch import Tensor


def runs_triton(tensor: Tensor) -> bool:
    """Whether a kernel can take the tensor: on a GPU, or anywhere in Triton's interpreter.

    torch.compile gets the written-out form, which it fuses itself.
    """
    if torch.compiler.is_compiling():
        return False
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
