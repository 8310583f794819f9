"""Pipeline placement: layers on several GPUs (`parallelize=True`), each GPU working on a window of its own.

PyTorch makes a copy from one GPU to another wait for all work that both have queued. With one stream for each GPU, each
GPU would therefore wait for the others. So every window under way has its own streams, one on each GPU, and a GPU
begins with a window when the window before has passed on to the next GPU. Otherwise both windows would share the first
GPU and then both the second.

accelerate copies positions and masks for every layer; here they are copied once for each GPU. After about a thousand
kernels that a GPU has not begun, the host waits, and could not queue the next window on the first GPU. For the same
reason the output head runs on more positions at once.

If memory runs out beside a second window, or is found only by waiting and freeing, windows run one at a time. Such
models generate with transformers' own loop, since no CUDA graph spans two GPUs.
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
"""The hooks that the newest relay of each model has registered on its blocks."""


class Relay:
    """The streams of the windows under way: as many windows as there are GPUs, each with one stream on every GPU."""

    def __init__(self, devices: list[torch.device]) -> None:
        self._devices = devices
        self._lanes = [{device: torch.cuda.Stream(device) for device in devices} for _ in devices]  # type: ignore[no-untyped-call]
        self._left: dict[torch.device, torch.cuda.Event] = {}
        self._copies: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}
        self._turn = 0
        self._under_way = False

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Returns the relay of a model whose blocks are all on GPUs, on two or more; None for other models."""
        hooked = [block for block in blocks_of(model) if hasattr(block, "_hf_hook")]
        devices = [device for block in hooked if (device := hooked_device(block)) and lies_on_one_device(block)]
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
        """How many windows may be under way at the same time."""
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
        """Runs the block's work for one window on this window's own streams."""
        lane = self._lanes[self._turn % len(self._lanes)]
        self._turn += 1
        with contextlib.ExitStack() as stack:
            for device in reversed(self._devices):  # reversed, so that the first device is the current one at last
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
        if self._retries() > before:  # (if memory ran out altogether, the caller gets the exception)
            self.alone()

    def _retries(self) -> int:
        """How often the allocator found memory only by waiting for the device and freeing cached blocks."""
        return sum(torch.cuda.memory_stats(device).get("num_alloc_retries", 0) for device in self._devices)

    def _pass_on(self, before: torch.device, after: torch.device, *_: object) -> None:
        if self._under_way:
            self._leave(before)
            self._enter(after)

    def _to_device(self, device: torch.device, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns a block's arguments with the keyword arguments on its device, copied at most once for a window."""
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
    """Returns the blocks that accelerate places, in the order of the module lists that hold them.

    A model that runs its blocks in another order is still computed correctly, but GPUs wait longer for one another.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(each) for outer in lists for block in outer for each in block.modules()}
    return [block for each in lists if id(each) not in inner for block in each]


def hooked_device(module: nn.Module) -> torch.device | None:
    """Returns the device on which accelerate's hook runs a module, None without such a hook or with another wrapper."""
    hook: Any = getattr(module, "_hf_hook", None)
    if type(hook) is not AlignDevicesHook or hook.offload or hook.execution_device is None:
        return None
    hooked: Any = vars(module).get("forward")
    if hooked is not None and getattr(hooked, "__wrapped__", None) != getattr(module, "_old_forward", None):
        return None
    return torch.device(hook.execution_device)


def lies_on_one_device(block: nn.Module) -> bool:
    """Whether all weights of a block stay on the block's device: no part is offloaded or has a hook of another kind."""
    return all(
        hooked_device(module) == hooked_device(block) for module in block.modules() if hasattr(module, "_hf_hook")
    )
