"""The processes that train together, as `accelerate launch` starts them, and weights sharded over them (FSDP).

The Trainer shards and gathers; states on disk always hold whole tensors, so that the final weights can be read from
one, and the checkpoint is the same as that of one process.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from sbeval.errors import UserError


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


STATE_FILE = "pytorch_model_fsdp.bin"


def prepare(trainer: Trainer, state: Path | None) -> None:
    """Settles how sharded weights are saved; does nothing where they are not sharded.

    Args:
        trainer: of the run.
        state: to be resumed.

    Raises:
        UserError: the first version of FSDP, or the state was saved by a run that was sharded otherwise.
    """
    sharded = bool(trainer.is_fsdp_enabled)
    if state is not None and (state / STATE_FILE).is_file() != sharded:
        found = "without it" if sharded else "with it"
        raise UserError(
            f"expected a run to go on as it was begun, found FSDP {'on' if sharded else 'off'} and {state} saved "
            f"{found}; launch it {'without' if sharded else 'with'} --fsdp, or choose another --out"
        )
    if not sharded:
        return
    plugin: Any = trainer.accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise UserError("expected FSDP's second version, found the first; launch with --fsdp_version 2")
    plugin.set_state_dict_type("FULL_STATE_DICT")


def whole_model(trainer: Trainer, kind: type[Any]) -> Any:
    """Returns the trained model with whole weights in this process's memory.

    All processes must ask; where weights were sharded, only the first gets them.

    Args:
        trainer: of a run that has ended.
        kind: class of the model before it was sharded.
    """
    if not trainer.is_fsdp_enabled:
        return trainer.model
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if not trainer.is_world_process_zero():
        return trainer.model
    sharded: Any = trainer.model
    model = kind(sharded.config)
    model.load_state_dict(weights)
    return model
