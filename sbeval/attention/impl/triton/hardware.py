"""What the device of a tensor offers the kernels, and the descriptors its copy engine reads tiles through."""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# the copy engine takes addresses and strides in units of this
COPY_ALIGNMENT_BYTES = 16
# where there is no GPU to ask, as many as an H100 has
MULTIPROCESSORS = 132


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's own."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def copies(tensor: Tensor) -> bool:
    """Whether tiles of `tensor` can be read and written by the copy engine (compute capability 9.0 and later)."""
    if not _capability(tensor) >= (9, 0) or tensor.data_ptr() % COPY_ALIGNMENT_BYTES:
        return False
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return tensor.numel() > 0 and all(
        size == 1 or (stride > 0 and stride * tensor.element_size() % COPY_ALIGNMENT_BYTES == 0)
        for size, stride in outer
    )


def describe(tensor: Tensor, block_keys: int, block_columns: int) -> TensorDescriptor:
    """A descriptor of `tensor` [B, G, K, D] for tiles of `block_keys` keys in the order of `sticks.keys_of_columns`.

    Keys are seen as [K / J, J] with J = block_keys / 8, last first, so that one copy brings them in that order. What
    lies outside is read as 0 and never written; so are up to J - 1 keys at the end, where J does not divide K.
    """
    batch, groups, keys, columns = tensor.shape
    aligned = COPY_ALIGNMENT_BYTES // tensor.element_size()
    # the stride of a dimension of one means nothing to torch, and must be a valid one here
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
    """Whether the kernels' inline assembly, NVIDIA's from compute capability 8.0 on, runs on the tensor's device."""
    return _capability(tensor) >= (8, 0)


def starts_early(tensor: Tensor) -> bool:
    """Whether a kernel may start before the one it follows has ended, on the tensor's device."""
    return _capability(tensor) >= (9, 0)


def shared_memory_bytes(tensor: Tensor) -> int:
    """Shared memory a program may use on the tensor's device; 0 where it is no GPU."""
    return int(_properties(tensor.device.index or 0).shared_memory_per_block_optin) if tensor.is_cuda else 0


def cache_bytes(tensor: Tensor) -> int:
    """Second-level cache of the tensor's device; 0 where it is no GPU."""
    return int(_properties(tensor.device.index or 0).L2_cache_size) if tensor.is_cuda else 0


def multiprocessors(tensor: Tensor) -> int:
    """Multiprocessors of the tensor's device."""
    return int(_properties(tensor.device.index or 0).multi_processor_count) if tensor.is_cuda else MULTIPROCESSORS


def _capability(tensor: Tensor) -> tuple[int, int]:
    if not tensor.is_cuda or torch.version.hip is not None:
        return (0, 0)
    properties = _properties(tensor.device.index or 0)
    return properties.major, properties.minor


@functools.cache
def _properties(index: int) -> Any:
    # torch's stubs lack the fields read here
    return torch.cuda.get_device_properties(index)
