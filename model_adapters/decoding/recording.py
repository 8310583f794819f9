"""Steps recorded as CUDA graphs, where that can be done."""

import contextlib
import logging
import os
from collections.abc import Callable

import torch

from sbeval.errors import first_line
from sbeval.model_adapters.batching import free_memory, out_of_memory

logger = logging.getLogger(__name__)
_failed: list[torch.cuda.CUDAGraph] = []
"""Kept, since torch's pinned memory goes on asking them."""


class Recording:
    """Records steps until one cannot be: the log says so once with the reason, and none is tried again.

    Args:
        device: of the model.

    Attributes:
        possible: steps may be recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self.possible = device.type == "cuda"
        if self.possible and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
            self._give_up("CUDA_LAUNCH_BLOCKING is set, and launches that wait for their kernels cannot be recorded")

    def graph_of(self, step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph | None:
        """Returns a step as a graph, None where it cannot be recorded; the step has run once before.

        Args:
            step: waits for nothing, and keeps no tensor of a run that raised.
            device: what it runs on.

        Raises:
            OutOfMemoryError: there is no memory for it.
        """
        if not self.possible:
            return None
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        own = torch.cuda.current_stream(device)
        side.wait_stream(own)
        with torch.cuda.device(device):
            with torch.cuda.stream(side):
                # kernels are compiled, libraries loaded and given their memory outside a recording
                step()
            own.wait_stream(side)
            graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            try:
                # a recording that fails does not leave its stream
                with torch.cuda.stream(own), torch.cuda.graph(graph, pool=pool, stream=side):
                    step()
                return graph
            except Exception as error:  # the step ran before, so whatever is raised is about recording it
                no_memory, reason = _why(error)  # and no error, which would keep the step's memory
            _take_back(graph, pool, device)
        if no_memory:
            raise torch.OutOfMemoryError("out of memory while a step was recorded")
        self._give_up(reason)
        return None

    def _give_up(self, reason: str) -> None:
        self.possible = False
        logger.warning("steps of generation cannot be recorded as a CUDA graph and run one by one: %s", reason)


def _why(error: BaseException) -> tuple[bool, str]:
    """Whether memory ran out, and what was said first: ending a recording that failed raises an error of its own."""
    first = error if error.__context__ is None else error.__context__
    return out_of_memory(error) or out_of_memory(first), first_line(first)


def _take_back(graph: torch.cuda.CUDAGraph, pool: tuple[int, int], device: torch.device) -> None:
    """Ends what a recording has begun that failed, which torch up to 2.13 leaves begun, all or in part.

    Until then no memory that is cached would be freed, random numbers would be refused, and the recording's own memory
    would be kept to the end of the process.
    """
    with contextlib.suppress(RuntimeError):  # it has been ended
        torch._C._cuda_endAllocateToPool(device.index, pool)
    graph.reset()
    _failed.append(graph)
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
    free_memory()
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    kept = [segment for segment in segments if tuple(segment["segment_pool_id"]) == pool]
    if kept and not any(segment["active_size"] for segment in kept):  # so it was not given back
        torch._C._cuda_releasePool(device.index, pool)
