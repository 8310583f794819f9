"""Layers spread over several GPUs (`parallelize=True`), each of which works on a window of its own.

PyTorch has a copy from one GPU to another wait for all that both were given before. With one stream a GPU, each GPU
would wait for whatever the others do. So windows have streams of their own, one on each GPU, and a GPU begins with a
window where the window before has passed on to the next GPU. accelerate copies positions and masks for each layer anew;
here once, since the host, too, waits where many copies do.
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
"""What the newest relay of each model hangs on its blocks."""


class Relay:
    """Streams for windows under way, as many as there are GPUs, each with a stream on every GPU."""

    def __init__(self, devices: list[torch.device]) -> None:
        self._devices = devices
        self._lanes = [{device: torch.cuda.Stream(device) for device in devices} for _ in devices]  # type: ignore[no-untyped-call]
        self._left: dict[torch.device, torch.cuda.Event] = {}
        self._copies: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}
        self._turn = 0
        self._under_way = False

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Returns the relay of a model whose blocks are spread over GPUs alone, None for others."""
        hooked = [block for block in blocks_of(model) if hasattr(block, "_hf_hook")]
        devices = [device for block in hooked if (device := hooked_device(block)) and lies_on_one_device(block)]
        order = list(dict.fromkeys(devices))
        if len(order) < 2 or len(devices) < len(hooked) or any(device.type != "cuda" for device in order):
            return None
        relay = cls(order)
        for handle in _handles.pop(model, []):  # of a relay before this one
            handle.remove()
        handles = _handles[model] = []
        for block, (before, after) in zip(hooked[1:], pairwise(devices), strict=True):
            if before != after:
                passing = functools.partial(relay._pass_on, before, after)
                handles.append(block.register_forward_pre_hook(passing))
            bringing = functools.partial(relay._bring, after)
            handles.append(block.register_forward_pre_hook(bringing, with_kwargs=True))
        return relay

    @property
    def windows(self) -> int:
        """How many windows may be under way."""
        return len(self._lanes)

    def alone(self) -> bool:
        """Has one window under way from now on, and returns whether there were more."""
        several = len(self._lanes) > 1
        if several:
            logger.warning("memory ran short beside another window: windows are run one at a time from now on")
        del self._lanes[1:]
        return several

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """Within it the GPUs are given one window's work, on its own streams."""
        lane = self._lanes[self._turn % len(self._lanes)]
        self._turn += 1
        with contextlib.ExitStack() as stack:
            for device in reversed(self._devices):  # the first is the current one then
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
        if self._retries() > before:  # where it ran out all the same, who asked for the window tries it alone
            self.alone()

    def _retries(self) -> int:
        """How often memory was found only by waiting for other windows and freeing what they left."""
        return sum(torch.cuda.memory_stats(device).get("num_alloc_retries", 0) for device in self._devices)

    def _pass_on(self, before: torch.device, after: torch.device, *_: object) -> None:
        if self._under_way:
            self._leave(before)
            self._enter(after)

    def _bring(self, device: torch.device, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Returns a block's arguments with those by name on its device, copied at most once a window."""
        return (given, {name: self._at(device, value) for name, value in named.items()}) if self._under_way else None

    def _at(self, device: torch.device, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(self._at(device, entry) for entry in value)
        if not isinstance(value, Tensor) or value.device == device or value.is_inference():
            return value
        key = id(value), value._version, device
        if key not in self._copies:  # with the original, whose id is its own as long as it is there
            self._copies[key] = value, value.to(device)
        return self._copies[key][1]

    def _enter(self, device: torch.device) -> None:
        if (left := self._left.get(device)) is not None:
            torch.cuda.current_stream(device).wait_event(left)

    def _leave(self, device: torch.device) -> None:
        self._left[device] = torch.cuda.current_stream(device).record_event()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that accelerate places, in the order of their lists; where they run in another, GPUs wait longer."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(each) for outer in lists for block in outer for each in block.modules()}
    return [block for each in lists if id(each) not in inner for block in each]


def hooked_device(module: nn.Module) -> torch.device | None:
    """Where a hook of accelerate's has a module run, if that is all that stands before the module's own forward."""
    hook: Any = getattr(module, "_hf_hook", None)
    if type(hook) is not AlignDevicesHook or hook.offload or hook.execution_device is None:
        return None
    hooked: Any = vars(module).get("forward")
    if hooked is not None and getattr(hooked, "__wrapped__", None) != getattr(module, "_old_forward", None):
        return None
    return torch.device(hook.execution_device)


def lies_on_one_device(block: nn.Module) -> bool:
    """Whether no part of a block has its weights brought from elsewhere, or a hook of another kind."""
    return all(
        hooked_device(module) == hooked_device(block) for module in block.modules() if hasattr(module, "_hf_hook")
    )
