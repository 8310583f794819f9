"""Steps recorded as CUDA graphs."""

import contextlib
import logging
import os
from collections.abc import Callable

import torch

from sbeval.errors import first_line
from sbeval.model_adapters.batching import free_memory, out_of_memory

logger = logging.getLogger(__name__)
_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs kept alive because torch's allocator of pinned memory still queries them."""


class Recording:
    """Records steps until one fails: the log gives the reason once, and no other is tried."""

    def __init__(self, device: torch.device) -> None:
        self.possible = device.type == "cuda"
        if self.possible and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
            self._give_up("CUDA_LAUNCH_BLOCKING is set, and launches that wait for their kernels cannot be recorded")

    def graph_of(self, step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph | None:
        """Runs a step, which never waits for the device, and returns it as a graph; None if it cannot be recorded.

        The step must keep no tensor if it raises.

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
                # compiles kernels, loads libraries and takes their memory, which cannot be done in a recording
                step()
            own.wait_stream(side)
            graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            try:
                # a recording that fails leaves its own stream current
                with torch.cuda.stream(own), torch.cuda.graph(graph, pool=pool, stream=side):
                    step()
                return graph
            except Exception as error:  # the step itself ran before, so only recording can have failed
                no_memory, reason = _why(error)  # the error itself would keep the step's memory
            _take_back(graph, pool, device)
        if no_memory:
            raise torch.OutOfMemoryError("out of memory while a step was recorded")
        self._give_up(reason)
        return None

    def _give_up(self, reason: str) -> None:
        self.possible = False
        logger.warning("steps of generation cannot be recorded as a CUDA graph and run one by one: %s", reason)


def _why(error: BaseException) -> tuple[bool, str]:
    """Whether memory ran out, and the first error's line: ending a failed recording raises another error."""
    first = error if error.__context__ is None else error.__context__
    return out_of_memory(error) or out_of_memory(first), first_line(first)


def _take_back(graph: torch.cuda.CUDAGraph, pool: tuple[int, int], device: torch.device) -> None:
    """Ends a failed recording, which torch up to 2.13 leaves open, at least in part.

    While it is open, torch frees no cached memory, refuses random numbers, and keeps the recording's own memory.
    """
    with contextlib.suppress(RuntimeError):  # torch has ended it already
        torch._C._cuda_endAllocateToPool(device.index, pool)
    graph.reset()
    _failed.append(graph)
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
    free_memory()
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    kept = [segment for segment in segments if tuple(segment["segment_pool_id"]) == pool]
    if kept and not any(segment["active_size"] for segment in kept):  # torch has not released it
        torch._C._cuda_releasePool(device.index, pool)
