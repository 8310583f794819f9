"""Counts the bytes of the tensors that operations create, as long as they live."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts, within the context, the bytes of the tensors that live at the same time; `peak` is the largest count."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self._live += storage.nbytes()
                self.peak = max(self.peak, self._live)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, storage: int, size: int) -> None:
        self._known.discard(storage)
        self._live -= size


@torch.no_grad()
def peak_bytes(run: Callable[[], Any]) -> int:
    """Returns the most bytes that the tensors of a call take at the same time."""
    with LiveBytes() as live:
        run()
    return live.peak
