"""Training on several ranks of `accelerate launch`: sharded weights (FSDP) and context parallelism.

FSDP: the Trainer shards the weights and gathers them. States (checkpoints to resume from) hold full tensors, so the
final weights can be read from a state, and the final checkpoint is the same as that of a run on one rank.

Context parallelism: consecutive ranks form a group and get the same windows. Each rank computes the loss of its part of
the tokens. All ranks have equally many tokens, so the mean of the gradients over all ranks is the gradient of the mean
loss over the windows.
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
    """Returns the number of ranks (`WORLD_SIZE`)."""
    return max(1, int(os.environ.get("WORLD_SIZE", "1")))


def minimum_over_ranks(value: Tensor) -> float:
    """Returns the minimum of `value` over all ranks. Every rank must call this function; it waits for the device."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        value = value.clone()
        torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MIN)
    return float(value)


STATE_FILE = "pytorch_model_fsdp.bin"


def prepare(trainer: Trainer, state: Path | None) -> None:
    """Makes FSDP save full tensors; does nothing without FSDP.

    Args:
        trainer: the trainer, before it trains.
        state: state to resume from, None for a new run.

    Raises:
        UserError: FSDP has version 1, or only one of the state's run and this run uses FSDP.
    """
    sharded = bool(trainer.is_fsdp_enabled)
    if state is not None and (state / STATE_FILE).is_file() != sharded:
        saved = "without it" if sharded else "with it"
        raise UserError(
            f"FSDP is {'on' if sharded else 'off'}, but {state} was saved {saved}; "
            f"launch it {'without' if sharded else 'with'} --fsdp, or choose another --out"
        )
    if not sharded:
        return
    plugin: Any = trainer.accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise UserError("Expected FSDP version 2, found version 1; launch with --fsdp_version 2")
    plugin.set_state_dict_type("FULL_STATE_DICT")


def gathered_model(trainer: Trainer, kind: type[Any]) -> Any:
    """Returns the trained model with full weights; with FSDP they are gathered on rank 0, in host memory.

    Every rank must call this function; with FSDP, ranks other than 0 get the sharded model. `kind` is the class of the
    model before sharding.
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
    """Checks the settings of context parallelism before anything is written.

    Args:
        degree: ranks that share a window.
        length_tokens: model inputs of a window.
        documents: "separate" or "joined".

    Raises:
        UserError: the number of ranks is no multiple of `degree`, the window does not split into 2 * `degree` equal
            chunks, or documents are masked from each other.
    """
    if degree == 1:
        return
    if process_count() % degree:
        raise UserError(
            f"Expected a multiple of {degree} ranks for --context-parallel {degree}, found {process_count()}; change "
            "the number of processes of `accelerate launch`"
        )
    if length_tokens % (2 * degree):
        raise UserError(
            f"Expected --context to be a multiple of {2 * degree} for --context-parallel {degree}, found "
            f"{length_tokens}; change one of them"
        )
    if documents != "joined":
        raise UserError(
            f"--context-parallel {degree} needs --documents joined, found {documents}; separate documents are usually "
            "short enough for one GPU: remove --context-parallel, or join them"
        )


def batches_for_groups(windows: int, batch_windows: int, degree: int) -> list[int]:
    """Returns the order in which a sampler yields window indices: each batch `degree` times in a row.

    accelerate deals batches to ranks in turn, so all `degree` ranks of a context-parallel group get the same batch.
    """
    batches = np.split(np.arange(windows), range(batch_windows, windows, batch_windows))
    order: list[int] = np.concatenate([np.tile(batch, degree) for batch in batches]).tolist()
    return order


def context_parallel_loss(model: Any, degree: int, device: torch.device) -> Callable[[nn.Module, Tensor], Tensor]:
    """Sets up context parallelism and returns the loss function of this rank.

    The function takes whole windows [windows, length + 1] and returns the mean loss in nats of this rank's positions.
    Context parallelism stays active afterwards, since activation checkpointing runs the forward pass again.

    Raises:
        UserError: the model does not support context parallelism, or ranks hold different models.
    """
    context: ContextParallel = join_context(model, degree, device)
    context.active = True

    def loss(wrapped: nn.Module, window_tokens: Tensor) -> Tensor:
        own_positions = context.positions(window_tokens.shape[1] - 1).to(window_tokens.device)
        logits = wrapped(
            input_ids=window_tokens[:, own_positions], position_ids=own_positions[None], use_cache=False
        ).logits
        return F.cross_entropy(logits.float().flatten(0, 1), window_tokens[:, own_positions + 1].flatten())

    return loss
