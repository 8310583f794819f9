"""Differences between machines: the memory addresses of weights, and the last digits of numbers."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

OFFSETS_BYTES = (0, 8, 40)  # past a multiple of 64, where torch itself places a tensor


def shifted(tensor: Tensor, offset_bytes: int) -> Tensor:
    """A copy of a contiguous tensor on a CPU that begins `offset_bytes` past a multiple of 64."""
    room = torch.empty(tensor.nbytes + 128, dtype=torch.uint8)
    start = -room.data_ptr() % 64 + offset_bytes
    copy = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def shift_weights() -> None:
    """Gives every new parameter of a module on a CPU the next of the offsets, for the rest of this process."""
    offsets = itertools.cycle(OFFSETS_BYTES)
    register = nn.Module.register_parameter

    def register_shifted(self: nn.Module, name: str, param: Any) -> None:
        # once: accelerate knows tied weights by their addresses
        if isinstance(param, nn.Parameter) and not hasattr(param, "shifted_bytes") and param.device.type == "cpu":
            param.shifted_bytes = offset_bytes = next(offsets)  # type: ignore[attr-defined]
            if type(param.data) is Tensor and param.is_contiguous() and param.numel():
                param.data = shifted(param.data, offset_bytes)
        register(self, name, param)

    nn.Module.register_parameter = register_shifted  # type: ignore[method-assign]


def assert_equal_but_for_rounding(computed: Tensor, expected: Tensor) -> None:
    """Checks that fp32 logits of a model and of its copy are equal but for the order of additions.

    A product of matrices adds in another order where a copy's weights begin elsewhere in memory, and on other
    processors; a copy that is another model differs a thousand times as much.
    """
    assert_close(computed, expected, rtol=1e-5, atol=1e-5)
