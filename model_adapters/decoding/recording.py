"""Steps recorded as CUDA graphs, where that can be done."""

import logging
import os
from collections.abc import Callable

import torch

from sbeval.model_adapters.batching import out_of_memory

logger = logging.getLogger(__name__)


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
            step: waits for nothing.
            device: what it runs on.

        Raises:
            OutOfMemoryError: there is no memory for it.
        """
        if not self.possible:
            return None
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device):
            with torch.cuda.stream(side):
                step()  # kernels are compiled and libraries loaded outside a recording
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    step()
            except RuntimeError as error:
                # ending a recording in which memory ran out raises an error of its own
                if out_of_memory(error) or (error.__context__ is not None and out_of_memory(error.__context__)):
                    raise torch.OutOfMemoryError("out of memory while a step was recorded") from error
                self._give_up(str(error).strip().partition("\n")[0] or type(error).__name__)
                return None
        return graph

    def _give_up(self, reason: str) -> None:
        self.possible = False
        logger.warning("steps of generation cannot be recorded as a CUDA graph and run one by one: %s", reason)
