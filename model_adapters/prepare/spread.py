"""Pipeline placement: layers on several GPUs (`parallelize=True`), which compute different windows at the same time.

A window is one batch of inputs in a forward pass. PyTorch makes a copy from one GPU to another wait for all work in the
current streams of both. With one stream for each GPU, each GPU would therefore wait for the other GPUs. So every window
has its own streams, one on each GPU. A GPU begins a window only after the window before has moved to the next GPU.
Otherwise two windows would share the first GPU, and then share the second.

The host must wait if a GPU has a queue of about a thousand kernels, and then it cannot queue the next window on the
first GPU. So few kernels are launched: accelerate copies positions and masks for every layer, but here they are copied
once for each GPU, and the output head runs on more positions at once.

If memory runs out, or is found only after waiting for the device and freeing cached blocks, windows run one at a time.
Models with pipeline placement generate with transformers' `generate`, since no CUDA graph spans two GPUs.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from accelerate.hooks import AlignDevicesHook
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

logger = logging.getLogger(__name__)
_handles: WeakKeyDictionary[nn.Module, list[RemovableHandle]] = WeakKeyDictionary()
"""For each model, the hooks that its newest `Relay` has registered on the model's blocks."""


class Relay:
    """The CUDA streams for running several windows at once: as many windows as GPUs, with one stream on each GPU."""

    def __init__(self, devices: list[torch.device]) -> None:
        self._devices = devices
        self._lanes = [{device: torch.cuda.Stream(device) for device in devices} for _ in devices]  # type: ignore[no-untyped-call]
        self._left: dict[torch.device, torch.cuda.Event] = {}
        self._copies: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}
        self._turn = 0
        self._under_way = False

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Returns the relay of a model whose blocks are placed on two or more GPUs; None for other models."""
        hooked = [block for block in blocks_of(model) if hasattr(block, "_hf_hook")]
        devices = [device for block in hooked if (device := hooked_device(block)) and is_on_one_device(block)]
        order = list(dict.fromkeys(devices))
        if len(order) < 2 or len(devices) < len(hooked) or any(device.type != "cuda" for device in order):
            return None
        relay = cls(order)
        for handle in _handles.pop(model, []):  # hooks of an earlier relay of this model
            handle.remove()
        handles = _handles[model] = []
        for block, (before, after) in zip(hooked[1:], pairwise(devices), strict=True):
            if before != after:
                passing = functools.partial(relay._pass_on, before, after)
                handles.append(block.register_forward_pre_hook(passing))
            moving = functools.partial(relay._to_device, after)
            handles.append(block.register_forward_pre_hook(moving, with_kwargs=True))
        return relay

    @property
    def windows(self) -> int:
        """How many windows may run at the same time."""
        return len(self._lanes)

    def alone(self) -> bool:
        """Allows one window at a time from now on, and returns whether more were allowed before."""
        several = len(self._lanes) > 1
        if several:
            logger.warning("memory ran short with several windows at once: windows run one at a time from now on")
        del self._lanes[1:]
        return several

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """Inside this context, the forward pass of one window runs on streams of its own."""
        lane = self._lanes[self._turn % len(self._lanes)]
        self._turn += 1
        with contextlib.ExitStack() as stack:
            for device in reversed(self._devices):  # reversed, so that the first device becomes the current one
                lane[device].wait_stream(torch.cuda.current_stream(device))
                stack.enter_context(torch.cuda.stream(lane[device]))
            self._enter(self._devices[0])
            self._under_way, before = True, self._retries()
            try:
                yield
            finally:
                self._under_way = False
                self._copies.clear()
                self._leave(self._devices[-1])
        if self._retries() > before:  # memory was short but sufficed; otherwise the caller gets an exception
            self.alone()

    def _retries(self) -> int:
        """Returns how often the allocator had to wait for the device and free cached blocks to find memory."""
        return sum(torch.cuda.memory_stats(device).get("num_alloc_retries", 0) for device in self._devices)

    def _pass_on(self, before: torch.device, after: torch.device, *_: object) -> None:
        if self._under_way:
            self._leave(before)
            self._enter(after)

    def _to_device(self, device: torch.device, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Moves a block's keyword arguments to its device, with one copy for each window and device.

        Returns the arguments and the keyword arguments, None (no change) if no window is running.
        """
        return (args, {name: self._at(device, value) for name, value in kwargs.items()}) if self._under_way else None

    def _at(self, device: torch.device, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(self._at(device, entry) for entry in value)
        if not isinstance(value, Tensor) or value.device == device or value.is_inference():
            return value
        key = id(value), value._version, device
        if key not in self._copies:  # the original is kept with its copy, so that its id is not reused
            self._copies[key] = value, value.to(device)
        return self._copies[key][1]

    def _enter(self, device: torch.device) -> None:
        if (left := self._left.get(device)) is not None:
            torch.cuda.current_stream(device).wait_event(left)

    def _leave(self, device: torch.device) -> None:
        self._left[device] = torch.cuda.current_stream(device).record_event()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks that accelerate places on devices, in the order of the module lists that hold them.

    If a model runs its blocks in another order, results stay right, but GPUs wait longer for one another.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(each) for outer in lists for block in outer for each in block.modules()}
    return [block for each in lists if id(each) not in inner for block in each]


def hooked_device(module: nn.Module) -> torch.device | None:
    """Returns the device on which accelerate's hook runs a module, None without such a hook or with other hooks."""
    hook: Any = getattr(module, "_hf_hook", None)
    if type(hook) is not AlignDevicesHook or hook.offload or hook.execution_device is None:
        return None
    hooked: Any = vars(module).get("forward")
    if hooked is not None and getattr(hooked, "__wrapped__", None) != getattr(module, "_old_forward", None):
        return None
    return torch.device(hook.execution_device)


def is_on_one_device(block: nn.Module) -> bool:
    """Whether all weights of a block stay on its device: no submodule is offloaded or has another kind of hook."""
    return all(
        hooked_device(module) == hooked_device(block) for module in block.modules() if hasattr(module, "_hf_hook")
    )
