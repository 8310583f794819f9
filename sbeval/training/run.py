"""One training run in its folder: resumed, trained, and left with its record of parts."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback

from sbeval.checkpoints.quiet import without_bars
from sbeval.corpora.tokenizers import load_tokenizer, tokenizer_sha256
from sbeval.errors import UserError
from sbeval.keeping.writing import written_beside
from sbeval.training.distributed import is_first_process, prepare, process_count, whole_model
from sbeval.training.full_disk import full_disk_named
from sbeval.training.recipe import TrainingSettings
from sbeval.training.record import RunPart, RunParts, read_lines, trim_log, write_lines
from sbeval.training.run_watch import RunWatch
from sbeval.training.trainer import (
    WindowTrainer,
    last_complete_state,
    next_token_loss,
    schedule_factor,
    training_arguments,
)
from sbeval.training.windows import TrainingWindows


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """What one command is to do in a run's folder.

    Attributes:
        out: the folder, claimed by this command alone (`claim`): `states/`, `training_log.jsonl`, `runs.jsonl`,
            `run.json`.
        settings: of the recipe or the context extension.
        max_seconds: stop with a resumable state after this time; None trains to the end.
        command: command line for the record.
        fsdp: shard weights, gradients and the optimizer over the processes.
        context_parallel: processes that share a window.
        started: `time.monotonic()` when the command started.
    """

    out: Path
    settings: TrainingSettings
    max_seconds: float | None
    command: str
    fsdp: bool
    context_parallel: int = 1
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def windows(self) -> int:
        """Windows seen over the whole run."""
        optimization = self.settings.optimization
        return optimization.steps * optimization.batch_tokens // self.settings.length_tokens

    def train(
        self, model: Any, windows: TrainingWindows, loss: Callable[[nn.Module, Tensor], Tensor] = next_token_loss
    ) -> Any | None:
        """Trains from the newest state.

        Returns:
            The trained model, whole only in the first process; None if time ran out first.

        Raises:
            UserError: loss or weights are not finite, the disk is full, or FSDP has a single process.
        """
        if self.fsdp and process_count() == 1:
            raise UserError("Expected several processes for --fsdp, found one; start it with `accelerate launch`")
        optimization = self.settings.optimization
        steps = optimization.steps
        state = last_complete_state(self.out / "states")
        first_step = int(state.name.rpartition("-")[2]) if state else 0
        if is_first_process():
            with full_disk_named(self.out):
                trim_log(self.out / "training_log.jsonl", first_step)
        parts = self._earlier_parts(first_step)
        watch = RunWatch(
            log=self.out / "training_log.jsonl",
            batch_tokens=optimization.batch_tokens,
            max_seconds=self.max_seconds,
            started=self.started,
            saved=lambda step: write_lines(self.out / "runs.jsonl", [*parts, self._part(first_step, step)]),
        )
        kind = type(model)
        trainer = WindowTrainer(
            factor=schedule_factor(optimization),
            window_loss=loss,
            model=model,
            context_parallel=self.context_parallel,
            args=training_arguments(
                self.settings, self.out / "states", fsdp=self.fsdp, context_parallel=self.context_parallel
            ),
            train_dataset=windows,
            callbacks=[watch],
        )
        prepare(trainer, state)
        watch.trainer = trainer
        trainer.remove_callback(PrinterCallback)  # the watch prints
        if first_step >= steps and state is not None:
            model.load_state_dict(kind.from_pretrained(state).state_dict())
            return model
        with full_disk_named(self.out), without_bars():
            trainer.train(resume_from_checkpoint=str(state) if state else None)
        if (bad_step := trainer.bad_step()) is not None:
            good = last_complete_state(self.out / "states")
            kept, again = ("no state had been saved before", "")
            if good:
                kept, again = f"the last good state is kept in {good}", " with another --out"
            raise UserError(
                f"Expected a finite loss and finite weights, found NaN or infinity at step {bad_step}; {kept}: lower "
                f"the learning rate and start again{again}"
            )
        if is_first_process():
            last_step = trainer.state.global_step
            with full_disk_named(self.out):
                write_lines(self.out / "runs.jsonl", [*parts, self._part(first_step, last_step)])
            if watch.out_of_time:
                print(f"stopped at step {last_step} of {steps} with its state saved; run the same command to go on")
        return None if watch.out_of_time else whole_model(trainer, kind)

    def _earlier_parts(self, first_step: int) -> list[dict[str, Any]]:
        """What earlier commands did, up to the step to resume from."""
        parts = read_lines(self.out / "runs.jsonl")
        return [part | {"last_step": min(part["last_step"], first_step)} for part in parts]

    def _part(self, first_step: int, last_step: int) -> dict[str, Any]:
        part = RunPart(
            command=self.command,
            first_step=first_step,
            last_step=last_step,
            seconds=round(time.monotonic() - self.started, 1),
            gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            peak_memory_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            processes=process_count(),
        )
        return dataclasses.asdict(part)

    def finish(
        self,
        model: Any,
        tokenizer: Any,
        folder: Path,
        record: Callable[[RunParts], dict[str, Any]],
        *,
        dtype: torch.dtype,
    ) -> None:
        """Writes weights, configuration, tokenizer and record as one Hugging Face folder, which appears whole.

        Args:
            model: the trained model, left in `dtype`.
            tokenizer: to lie beside it.
            folder: the checkpoint, which does not stand there yet.
            record: makes the record from what the run left.
            dtype: of the weights.

        Raises:
            UserError: the disk is full; the run's states are kept.
        """
        if not is_first_process():
            return
        if folder.exists():
            raise UserError(f"Expected nothing at {folder} yet, found a file or folder: move it away and run again")
        with full_disk_named(self.out), without_bars(), written_beside(folder) as partial:
            tokenizer.save_pretrained(partial)
            model.to(dtype).save_pretrained(partial)
            parts = RunParts(read_lines(self.out / "runs.jsonl"), read_lines(self.out / "training_log.jsonl"))
            found = {**record(parts), "tokenizer_sha256": tokenizer_sha256(load_tokenizer(partial))}
            text = json.dumps(found, indent=1)
            (partial / "training_record.json").write_text(text, encoding="utf-8")
            for file in partial.iterdir():
                file.chmod(0o644)
