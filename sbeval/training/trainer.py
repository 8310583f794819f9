"""transformers' Trainer with our own data order, loss and learning-rate schedules, and the handling of its states."""

import functools
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

from sbeval.errors import UserError
from sbeval.keeping.writing import set_aside
from sbeval.processes.ranks import is_first_process
from sbeval.training.distributed import batches_for_groups, context_parallel_loss, minimum_over_ranks, process_count
from sbeval.training.losses import Loss
from sbeval.training.recipe import OptimizationSettings, TrainingSettings
from sbeval.training.record import COMPLETE_MARK

STATES_KEPT = 2
_STATE = re.compile(r"checkpoint-\d+", re.ASCII)
_TRAINER_FILE = re.compile(
    r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?|pytorch_model_fsdp\.bin|rng_state(_\d+)?\.pth|"
    r"(config|generation_config|trainer_state)\.json|training_args\.bin|(optimizer|scheduler|scaler)\.(pt|bin)|"
    + re.escape(COMPLETE_MARK)
)


class WindowTrainer(Trainer):
    """Trainer that reads windows in training order, and remembers the first step with a non-finite loss or weight."""

    def __init__(
        self, *, factor: Callable[[int], float], window_loss: Loss, context_parallel: int, **rest: Any
    ) -> None:
        super().__init__(data_collator=lambda window_tokens: {"window_tokens": window_tokens}, **rest)
        self._factor = factor
        self._window_loss = window_loss
        self._context_parallel = context_parallel
        if context_parallel > 1:
            self._window_loss = context_parallel_loss(self.model, context_parallel, self.args.device)
        # our loss is a mean over windows of equal length, so the Trainer must weight accumulation steps equally
        self.model_accepts_loss_kwargs = False
        self.first_non_finite_step: Tensor | None = None

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self._context_parallel == 1:
            return SequentialSampler(train_dataset)
        return batches_for_groups(len(train_dataset), self.args.per_device_train_batch_size, self._context_parallel)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Returns the loss of a batch.

        The first step with a non-finite loss is stored in a tensor on the device, so that nothing waits for the device.
        """
        del return_outputs, num_items_in_batch
        loss = self._window_loss(model, inputs["window_tokens"])
        self._note(loss.detach().isfinite(), self.state.global_step + 1)
        return loss

    def note_weights(self) -> None:
        """Remembers the current step if a weight is not finite.

        It is called before a state is saved: the next loss, which would show the same, is computed too late.
        """
        model: Any = self.model
        finite = torch.stack([_local_shard(weight).isfinite().all() for weight in model.parameters()]).all()
        self._note(finite, self.state.global_step)

    def _note(self, finite: Tensor, step: int) -> None:
        """Keeps the smallest step with a non-finite value, as a tensor on the device."""
        step_or_inf = torch.where(finite, math.inf, float(step))
        self.first_non_finite_step = (
            step_or_inf
            if self.first_non_finite_step is None
            else torch.minimum(self.first_non_finite_step, step_or_inf)
        )

    def non_finite_step(self) -> int | None:
        """Returns the first step with a non-finite loss or weight, None if all were finite.

        Waits for the device, and every rank must call it.
        """
        if self.first_non_finite_step is None:
            return None
        step = minimum_over_ranks(self.first_non_finite_step)
        return int(step) if math.isfinite(step) else None

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LambdaLR:
        """Creates the learning-rate scheduler from the schedule of the run's settings."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.optimizer
            assert optimizer is not None
            self.lr_scheduler = LambdaLR(optimizer, self._factor)
        scheduler: LambdaLR = self.lr_scheduler
        return scheduler


def schedule_factor(optimization: OptimizationSettings) -> Callable[[int], float]:
    """Returns the schedule: a function that maps a step to the learning rate as a fraction of its peak."""
    functions = {"cosine": cosine, "warmup_stable_decay": warmup_stable_decay, "extension": extension}
    return functools.partial(
        functions[optimization.schedule], steps=optimization.steps, warmup_steps=optimization.warmup_steps
    )


def passes_of_a_step(optimization: OptimizationSettings, length_tokens: int, processes: int) -> tuple[int, int]:
    """Returns the number of windows in one forward pass of one rank, and the gradient accumulation steps.

    Raises:
        UserError: a batch does not split evenly over the ranks, so that steps would be smaller than `batch_tokens`.
    """
    batch_windows = optimization.batch_tokens // length_tokens
    micro_windows = (optimization.micro_batch_tokens or optimization.batch_tokens // processes) // length_tokens
    if micro_windows < 1 or batch_windows % (micro_windows * processes):
        micro = optimization.micro_batch_tokens
        passes = "" if micro is None else f" in forward passes of {micro}"
        raise UserError(
            f"Batches of {optimization.batch_tokens} tokens{passes} do not split evenly over {processes} ranks in "
            f"windows of {length_tokens} tokens; change batch_tokens, micro_batch_tokens or the number of processes"
        )
    return micro_windows, batch_windows // (micro_windows * processes)


def training_arguments(
    settings: TrainingSettings, states: Path, *, fsdp: bool, context_parallel: int = 1
) -> TrainingArguments:
    """Returns transformers' `TrainingArguments` for the settings; the Trainer saves its states in `states`."""
    optimization = settings.optimization
    processes = process_count() // context_parallel
    micro_windows, accumulation_steps = passes_of_a_step(optimization, settings.length_tokens, processes)
    shard: Any = True if fsdp else None  # the argument is annotated as a string, but transformers deprecates strings
    return TrainingArguments(
        output_dir=str(states),
        max_steps=optimization.steps,
        per_device_train_batch_size=micro_windows,
        gradient_accumulation_steps=accumulation_steps,
        learning_rate=optimization.learning_rate,
        weight_decay=optimization.weight_decay,
        adam_beta1=optimization.beta1,
        adam_beta2=optimization.beta2,
        max_grad_norm=optimization.gradient_clip,
        optim="adamw_torch_fused" if torch.cuda.is_available() else "adamw_torch",
        bf16=settings.precision == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
        seed=settings.seed,
        logging_steps=settings.log_every_steps,
        logging_nan_inf_filter=False,
        save_steps=settings.save_every_steps,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
        accelerator_config={"split_batches": False, "dispatch_batches": False},
        fsdp=shard,
        fsdp_config={"version": 2, "state_dict_type": "FULL_STATE_DICT"} if fsdp else None,
    )


def holds_states(states: Path) -> bool:
    """Whether a folder holds a complete state (checkpoint to resume from), or anything that no Trainer writes."""
    if not states.is_dir():
        return states.exists()
    return any((entry / COMPLETE_MARK).exists() or not _holds_only_trainer_files(entry) for entry in states.iterdir())


def last_complete_state(states: Path) -> Path | None:
    """Returns the newest complete state, None if there is none.

    Rank 0 removes incomplete states. An incomplete state with files that no Trainer writes is moved aside instead.

    Raises:
        UserError: such a folder cannot be moved.
    """
    complete = _complete_states(states)
    for folder in states.glob("checkpoint-*") if is_first_process() else ():
        if _STATE.fullmatch(folder.name) and folder not in complete:
            if _holds_only_trainer_files(folder):
                shutil.rmtree(folder)
            else:
                set_aside(folder)
    return complete[-1] if complete else None


def remove_older_states(states: Path) -> None:
    """Removes complete states except the newest `STATES_KEPT` and those with files that no Trainer writes."""
    for folder in _complete_states(states)[:-STATES_KEPT]:
        if _holds_only_trainer_files(folder):
            (folder / COMPLETE_MARK).unlink()  # first, so that a half-removed state does not count as complete
            shutil.rmtree(folder)


def _complete_states(states: Path) -> list[Path]:
    """Returns the folders of complete states, in order of their steps."""
    complete = [folder for folder in states.glob("checkpoint-*") if (folder / COMPLETE_MARK).is_file()]
    return sorted(
        (folder for folder in complete if _STATE.fullmatch(folder.name)),
        key=lambda folder: int(folder.name.rpartition("-")[2]),
    )


def _holds_only_trainer_files(folder: Path) -> bool:
    return (
        folder.is_dir()
        and not folder.is_symlink()
        and all(_TRAINER_FILE.fullmatch(entry.name) and entry.is_file() for entry in folder.iterdir())
    )


def _local_shard(weight: Tensor) -> Tensor:
    """Returns this rank's shard of a weight, or the whole weight without FSDP."""
    local: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return local.detach()


def cosine(step: int, *, steps: int, warmup_steps: int) -> float:
    """Returns the learning rate as a fraction of its peak: linear warm-up, then cosine decay to zero."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1.0 + math.cos(math.pi * _share(step, warmup_steps, steps)))


def warmup_stable_decay(step: int, *, steps: int, warmup_steps: int, decay_share: float = 0.2) -> float:
    """Returns the learning rate as a fraction of its peak: linear warm-up, constant, then 1 - sqrt decay to zero.

    The decay takes the last `decay_share` of the steps.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_start = max(warmup_steps, round(steps * (1.0 - decay_share)))
    return 1.0 - math.sqrt(_share(step, decay_start, steps))


def extension(step: int, *, steps: int, warmup_steps: int, first_share: float = 0.08) -> float:
    """Returns the learning rate, as a fraction of its peak, in a context extension (Tan et al. 2025, appendix C.1).

    Warm-up is linear from `first_share` of the peak. After it the fraction is (e^(1-x) - 1) / (e - 1), with x from 0 to
    1: an exponential decay that reaches zero.
    """
    if step < warmup_steps:
        return first_share + (1.0 - first_share) * step / warmup_steps
    return (math.exp(1.0 - _share(step, warmup_steps, steps)) - 1.0) / (math.e - 1.0)


def _share(step: int, start: int, end: int) -> float:
    """Returns the position of `step` between `start` (0) and `end` (1)."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))
