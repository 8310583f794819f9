"""Layers spread over several GPUs (`parallelize=True`), so that each GPU works on a window of its own.

PyTorch lets a copy from one GPU to another begin when both have done what they were given before. accelerate copies the
positions and masks that all layers are given for each layer anew, so the first GPU, which holds them, waits in between
for all layers of the others. Here they are copied to a GPU once, where the window passes on to it.
"""

import functools
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


class _Copies:
    """Copies of tensors on other devices, each held as long as its original and used until that is written to."""

    def __init__(self) -> None:
        self._of: Any = WeakTensorKeyDictionary()

    def at(self, device: Any, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self.at(device, entry) for entry in value)
        if not isinstance(value, Tensor) or value.device == device or value.is_inference():
            return value
        copies = self._of.setdefault(value, {})
        if (held := copies.get(device)) is None or held[0] != value._version:
            copies[device] = held = value._version, value.to(device)
        return held[1]


def copy_once(model: nn.Module) -> None:
    """Has what accelerate copies to each layer by name copied once to each device; other models stay as they are."""
    copies = _Copies()

    def bring(device: Any, _: nn.Module, positional: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return positional, {name: copies.at(device, value) for name, value in named.items()}

    for layers in model.modules():
        for layer in layers if isinstance(layers, nn.ModuleList) else ():
            hook = getattr(layer, "_hf_hook", None)
            if isinstance(hook, AlignDevicesHook) and hook.execution_device is not None:
                device = torch.device(hook.execution_device)
                layer.register_forward_pre_hook(functools.partial(bring, device), with_kwargs=True)
