"""The processes that train together, as `accelerate launch` starts them, and weights sharded over them (FSDP).

The Trainer shards and gathers; states on disk always hold whole tensors, so that the final weights can be read from
one, and the checkpoint is the same as that of one process.

Where windows are shared (context parallelism), consecutive processes form a group and are given the same windows, each
of which counts once. A process's loss is that of its own tokens; they are equally many, so the mean of the gradients
over all processes is that of the windows.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer

from sbeval.attention.context_parallel import ContextParallel
from sbeval.errors import UserError
from sbeval.scoring.context_parallel import join_context


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

    Raises:
        UserError: the first version of FSDP, or the state to be resumed was saved by a run that was sharded otherwise.
    """
    sharded = bool(trainer.is_fsdp_enabled)
    if state is not None and (state / STATE_FILE).is_file() != sharded:
        saved = "without it" if sharded else "with it"
        raise UserError(
            f"Expected a run to go on as it was begun, found FSDP {'on' if sharded else 'off'} and {state} saved "
            f"{saved}; launch it {'without' if sharded else 'with'} --fsdp, or choose another --out"
        )
    if not sharded:
        return
    plugin: Any = trainer.accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise UserError("Expected FSDP's second version, found the first; launch with --fsdp_version 2")
    plugin.set_state_dict_type("FULL_STATE_DICT")


def whole_model(trainer: Trainer, kind: type[Any]) -> Any:
    """Returns the trained model with whole weights in this process's memory; `kind` is its class before it was sharded.

    All processes must ask; where weights were sharded, only the first gets them.
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


def check_context_parallel(degree: int, length_tokens: int, documents: str) -> None:
    """Checks, before anything is written, what can be shared.

    Raises:
        UserError: processes are left over, windows do not cut into equal chunks, or documents are kept apart.
    """
    if degree == 1:
        return
    if process_count() % degree:
        raise UserError(
            f"Expected processes in groups of --context-parallel {degree}, found {process_count()}; start a multiple "
            f"of {degree} with `accelerate launch`"
        )
    if length_tokens % (2 * degree):
        raise UserError(
            f"Expected --context to be a multiple of {2 * degree} for --context-parallel {degree}, found "
            f"{length_tokens}; change one of them"
        )
    if documents != "joined":
        raise UserError(
            f"Expected --documents joined for --context-parallel {degree}, found {documents}; documents that do not "
            "see each other are short, and need no group"
        )


def each_batch_for_a_group(windows: int, batch_windows: int, degree: int) -> list[int]:
    """Returns the order of the windows, each batch once for each of the `degree` processes of a group, to whom
    accelerate gives it in turn.
    """
    batches = np.split(np.arange(windows), range(batch_windows, windows, batch_windows))
    order: list[int] = np.concatenate([np.tile(batch, degree) for batch in batches]).tolist()
    return order


def shared_loss(model: Any, degree: int, device: torch.device) -> Callable[[nn.Module, Tensor], Tensor]:
    """Joins the groups and returns the loss of this process's part of windows [windows, length + 1].

    The model takes parts of windows from now on, in the backward pass too, where it may compute activations again.

    Raises:
        UserError: the model cannot be shared so, or processes hold different models.
    """
    context: ContextParallel = join_context(model, degree, device)
    context.active = True

    def loss(wrapped: nn.Module, window_tokens: Tensor) -> Tensor:
        ours = context.positions(window_tokens.shape[1] - 1).to(window_tokens.device)
        logits = wrapped(input_ids=window_tokens[:, ours], position_ids=ours[None], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), window_tokens[:, ours + 1].flatten())

    return loss
