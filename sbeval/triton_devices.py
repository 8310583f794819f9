"""Where Triton's kernels run."""

import os

from torch import Tensor


def runs_triton(tensor: Tensor) -> bool:
    """Whether a kernel can take the tensor: on a GPU, or anywhere in Triton's interpreter."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
