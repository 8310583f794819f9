"""Captures decode steps as CUDA graphs."""

import contextlib
import logging
import os
from collections.abc import Callable

import torch

from sbeval.errors import first_line
from sbeval.model_adapters.batching import free_memory, out_of_memory

logger = logging.getLogger(__name__)
_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. They stay referenced because torch's allocator of pinned memory still queries them."""


class GraphCapture:
    """Captures decode steps as CUDA graphs. If a capture fails, it logs the reason and makes no further captures."""

    def __init__(self, device: torch.device) -> None:
        self.possible = device.type == "cuda"
        if self.possible and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
            self._give_up("CUDA_LAUNCH_BLOCKING is set, and a capture cannot wait for each kernel")

    def graph_of(self, step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph | None:
        """Runs a step once and captures it as a CUDA graph; returns None if it cannot be captured.

        The step must not synchronise with the device, and if it raises, it must not leave a tensor referenced.

        Raises:
            OutOfMemoryError: there is no memory for the graph.
        """
        if not self.possible:
            return None
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        with torch.cuda.device(device):
            with torch.cuda.stream(side):
                # warm-up: compiles kernels, loads libraries and allocates their memory, which a capture does not allow
                step()
            current.wait_stream(side)
            graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            try:
                # restores the current stream, because a failed capture leaves its own stream as the current one
                with torch.cuda.stream(current), torch.cuda.graph(graph, pool=pool, stream=side):
                    step()
                return graph
            except Exception as error:  # the warm-up above succeeded, so the capture itself has failed
                no_memory, reason = _why(error)  # a reference to the error would keep the step's tensors alive
            _end_capture(graph, pool, device)
        if no_memory:
            raise torch.OutOfMemoryError("out of memory while a decode step was captured as a CUDA graph")
        self._give_up(reason)
        return None

    def _give_up(self, reason: str) -> None:
        self.possible = False
        logger.warning("decode steps run one by one, since they cannot be captured as a CUDA graph: %s", reason)


def _why(error: BaseException) -> tuple[bool, str]:
    """Returns whether memory ran out, and the first line of the first error: ending a failed capture raises another."""
    first = error if error.__context__ is None else error.__context__
    return out_of_memory(error) or out_of_memory(first), first_line(first)


def _end_capture(graph: torch.cuda.CUDAGraph, pool: tuple[int, int], device: torch.device) -> None:
    """Ends a failed capture completely; torch up to 2.13 does so only in part.

    Until then torch frees no cached memory, refuses to draw random numbers, and keeps the memory of the capture.
    """
    with contextlib.suppress(RuntimeError):  # torch has ended the capture already
        torch._C._cuda_endAllocateToPool(device.index, pool)
    graph.reset()
    _failed.append(graph)
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
    free_memory()
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    pool_segments = [segment for segment in segments if tuple(segment["segment_pool_id"]) == pool]
    if pool_segments and not any(
        segment["active_size"] for segment in pool_segments
    ):  # torch has not released the pool
        torch._C._cuda_releasePool(device.index, pool)
