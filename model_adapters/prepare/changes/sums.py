"""Row-parallel linear layers of a tensor plan (`tp_plan`), with another all-reduce for small sums.

NCCL takes about 40 microseconds for the all-reduce behind attention or an MLP, which for a few tokens is longer than
the linear layer takes. Where two GPUs reach each other's memory, each reads the other's part instead.
"""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear

from sbeval.model_adapters.prepare.change import Change, Setting, Undo

SMALL_BYTES = 2**19
_PROCESSES = 2  # of more, each would add in another order, and round otherwise than the others


class SharedSum:
    """Adds up what the processes of a group hold."""

    def __init__(self, group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._buffer = _shared_memory(group, dtype, device)

    def __call__(self, addend: Tensor) -> Tensor:
        """Returns the sum of every process's addend, each of which may be overwritten."""
        if (buffer := self._buffer) is not None and addend.dtype == buffer.dtype and addend.is_contiguous():
            read_whole = addend.nbytes % 16 == addend.data_ptr() % 16 == 0  # as the kernel reads
            if read_whole and addend.numel() <= buffer.numel():
                return _one_shot(buffer, addend, self._group)
        all_reduce(addend, group=self._group)
        return addend


def _shared_memory(group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Memory of a GPU that the other reads, None where that does not work for every process."""
    if device.type != "cuda" or group.size() != _PROCESSES:
        return None
    buffer, works = None, torch.zeros(1, device=device)
    with contextlib.suppress(ImportError, AttributeError, RuntimeError):  # builds and GPUs differ, and NCCL remains
        from torch.distributed import _symmetric_memory as symmetric_memory  # not in every build of PyTorch

        buffer = symmetric_memory.empty(SMALL_BYTES // dtype.itemsize, dtype=dtype, device=device)
        symmetric_memory.rendezvous(buffer, group)
        works += 1
    all_reduce(works, ReduceOp.MIN, group)  # or the next kernel might wait for a process that has none
    if not works:
        return None
    with contextlib.suppress(AttributeError, RuntimeError):
        addend = torch.full((8,), float(1 + group.rank()), dtype=dtype, device=device)
        works *= (_one_shot(buffer, addend, group) == 3).all()
        all_reduce(works, ReduceOp.MIN, group)
        return buffer if works else None
    return None  # there is no such operator for the dtype, in no process


def _one_shot(buffer: Any, addend: Tensor, group: ProcessGroup) -> Tensor:
    operator = torch.ops.symm_mem.one_shot_all_reduce_copy
    total: Tensor = operator(buffer[: addend.numel()].view(addend.shape), addend, "sum", group.group_name)
    return total


class SummedMap:
    """Stands in for the forward of a map whose inputs are dealt out.

    Calls that where gradients are wanted, and where it is given all inputs and deals them out itself.

    Attributes:
        total: adds up what the processes compute.
        planned: the forward of the plan.
    """

    def __init__(self, of: nn.Linear, total: SharedSum) -> None:
        self.planned, self.total, self._map = of.forward, total, of

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs of this process] to [..., outputs], the same in every process."""
        weight: Any = self._map.weight
        held = weight.to_local()
        if torch.is_grad_enabled() or isinstance(x, DTensor) or x.shape[-1] != held.shape[1]:
            return self.planned(x)
        summed = self.total(linear(x, held))
        bias: Any = self._map.bias
        return summed if bias is None else summed + (bias.to_local() if isinstance(bias, DTensor) else bias)


def sum_quickly(model: nn.Module) -> list[nn.Module]:
    """Gives every map whose outputs processes add up the forward above, and returns those maps."""
    shared_sum = functools.cache(SharedSum)
    changed: list[nn.Module] = []
    for module in model.modules():
        if type(module) is nn.Linear and "forward" in vars(module) and isinstance(weight := module.weight, DTensor):
            mesh, plain = weight.device_mesh, not module._forward_hooks and not module._forward_pre_hooks
            if plain and mesh.ndim == 1 and weight.placements == (Shard(1),):
                total = shared_sum(mesh.get_group(), weight.dtype, weight.device)
                vars(module)["forward"] = SummedMap(module, total)
                changed.append(module)
    return changed


def give_back_sums(maps: list[nn.Module]) -> None:
    """Gives maps from `sum_quickly` the forward of their plan again."""
    for module in maps:
        vars(module)["forward"] = vars(module)["forward"].planned


def _apply(model: nn.Module, setting: Setting) -> Undo | None:
    return functools.partial(give_back_sums, maps) if (maps := sum_quickly(model)) else None


CHANGE = Change(name="small all-reduces", apply=_apply, wanted=lambda setting: setting.replaces_parts, judged=True)
