"""Data parallel runs where there is no GPU."""

import os

import torch


def find_processes() -> None:
    """Makes accelerate join processes launched together on a machine without an accelerator.

    Left to itself it takes each of them for the only one there, and every process evaluates everything.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
