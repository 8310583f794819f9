"""The device a user names: is it one this machine has?"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sbeval.errors import UserError, shown

_KINDS = re.compile(r"cpu|(cuda|mps|npu|xpu|hpu)(?::(\d+))?")
# the lists of GPUs that drivers keep, and what else may lead to one: AMD's, a Linux below Windows, NVIDIA's own boards
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_OTHER_WAYS = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvmap", "/dev/dxg", "/dev/kfd")


def check_device_early(device: Any) -> None:
    """Refuses a device that this machine cannot have, as far as files tell it, before torch is imported.

    Args:
        device: as `--device` has it; None for none named.

    Raises:
        UserError: no device is called so, or there are fewer.
    """
    # lm-eval names cuda:0 where none is asked for, and without a GPU its model then takes the CPU
    if device is None or str(device) in ("cpu", "cuda:0"):
        return
    known = _KINDS.fullmatch(str(device))
    kind, number = (known[1], int(known[2] or 0)) if known else (None, 0)
    most = _most_cuda_devices() if kind == "cuda" else 0 if kind == "mps" and sys.platform != "darwin" else None
    if known is None or (most is not None and number >= most):
        raise UserError(_refusal(device, most or 0, kind))


def check_device(device: Any) -> None:
    """Refuses a device that torch does not find: lm-eval's model would take another without a word.

    Args:
        device: as `check_device_early` takes it.

    Raises:
        UserError: as there.
    """
    check_device_early(device)
    if device is None or str(device) in ("cpu", "cuda:0"):
        return
    import torch

    known = _KINDS.fullmatch(str(device))
    accelerator = torch.accelerator.current_accelerator()
    there = 0 if accelerator is None else torch.accelerator.device_count()
    if known is None or accelerator is None or known[1] != accelerator.type or int(known[2] or 0) >= there:
        raise UserError(_refusal(device, there, None if accelerator is None else accelerator.type))


def _refusal(device: Any, there: int, kind: str | None) -> str:
    return (
        f"Expected device to be one there is, such as cpu or cuda:0, found {shown(device)} with {there} "
        f"{'accelerators' if kind is None else f'{kind} devices'}: correct --device."
    )


def _most_cuda_devices() -> int | None:
    """Returns the most devices that torch can find, None where files do not tell."""
    spec = find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if version is not None and version.is_file():
        built_for = re.findall(r"^(?:cuda|hip)\b.*?=\s*(\S+)", version.read_text(encoding="utf-8"), re.MULTILINE)
        if built_for and set(built_for) == {"None"}:
            return 0
    if _NVIDIA_GPUS.is_dir():
        return len(list(_NVIDIA_GPUS.iterdir()))
    if sys.platform != "linux" or any(next(Path("/").glob(way[1:]), None) for way in _OTHER_WAYS):
        return None
    return 0
