"""Properties of a tensor's device, and the tensor descriptors for its copy engine (TMA)."""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# addresses and strides must be multiples of this for the copy engine
COPY_ALIGNMENT_BYTES = 16
# the number of an H100, used if the tensor is not on a GPU
MULTIPROCESSORS = 132


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes the tensor's device current, since Triton launches kernels on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def copies(tensor: Tensor) -> bool:
    """Whether the copy engine (TMA, compute capability 9.0 and later) can read and write tiles of the tensor."""
    if not _capability(tensor) >= (9, 0) or tensor.data_ptr() % COPY_ALIGNMENT_BYTES:
        return False
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return tensor.numel() > 0 and all(
        size == 1 or (stride > 0 and stride * tensor.element_size() % COPY_ALIGNMENT_BYTES == 0)
        for size, stride in outer
    )


def describe(tensor: Tensor, block_keys: int, block_columns: int) -> TensorDescriptor:
    """Returns a descriptor of `tensor` [B, G, K, D] for tiles of `block_keys` keys in the order of `keys_of_columns`.

    The descriptor's shape is [B, G, J, K / J, D] with J = block_keys / 8, so that one copy loads keys in that order.
    Elements outside the descriptor are read as 0 and never written. If J does not divide K, the last K % J keys are
    outside too.
    """
    batch, groups, keys, columns = tensor.shape
    aligned = COPY_ALIGNMENT_BYTES // tensor.element_size()
    # PyTorch leaves the stride of a dimension of size 1 arbitrary; the descriptor needs a valid one
    strides = [
        stride if size > 1 else aligned for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ]
    each = block_keys // 8
    return TensorDescriptor(
        tensor,
        [batch, groups, each, max(1, keys // each), columns],
        [*strides, strides[2] * each, 1],
        [1, 1, each, 8, block_columns],
    )


def has_assembly(tensor: Tensor) -> bool:
    """Whether the kernels' inline PTX (compute capability 8.0 and later) runs on the tensor's device."""
    return _capability(tensor) >= (8, 0)


def starts_early(tensor: Tensor) -> bool:
    """Whether the device supports programmatic dependent launch: a kernel starts before the previous one has ended."""
    return _capability(tensor) >= (9, 0)


def shared_memory_bytes(tensor: Tensor) -> int:
    """Returns the bytes of shared memory that a program may use on the tensor's device; 0 if it is not a GPU."""
    return int(_properties(tensor.device.index or 0).shared_memory_per_block_optin) if tensor.is_cuda else 0


def cache_bytes(tensor: Tensor) -> int:
    """Returns the bytes of L2 cache of the tensor's device; 0 if it is not a GPU."""
    return int(_properties(tensor.device.index or 0).L2_cache_size) if tensor.is_cuda else 0


def multiprocessors(tensor: Tensor) -> int:
    """Returns the number of multiprocessors of the tensor's device; an H100's number if it is not a GPU."""
    return int(_properties(tensor.device.index or 0).multi_processor_count) if tensor.is_cuda else MULTIPROCESSORS


def _capability(tensor: Tensor) -> tuple[int, int]:
    if not tensor.is_cuda or torch.version.hip is not None:
        return (0, 0)
    properties = _properties(tensor.device.index or 0)
    return properties.major, properties.minor


@functools.cache
def _properties(index: int) -> Any:
    # Any, because torch's type stubs lack the fields that callers read
    return torch.cuda.get_device_properties(index)
