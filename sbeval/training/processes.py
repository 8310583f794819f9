"""The processes that train together, as `accelerate launch` starts them."""

import os

import torch
from torch import Tensor


def is_first_process() -> bool:
    """Whether this process writes what all processes share."""
    return int(os.environ.get("RANK", "0")) == 0


def process_count() -> int:
    """How many processes train together."""
    return max(1, int(os.environ.get("WORLD_SIZE", "1")))


def smallest_over_processes(value: Tensor) -> float:
    """Returns the smallest of a number that each process has; waits for the device, and all processes must ask."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        value = value.clone()
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MIN)
    return float(value)
