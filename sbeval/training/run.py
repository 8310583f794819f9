"""One training run in its folder: resumed, trained and watched, and left with its record."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from transformers import PrinterCallback

from sbeval.checkpoints.quiet import without_bars
from sbeval.corpora.seen import keep_seen
from sbeval.corpora.tokenizers import load_tokenizer, tokenizer_sha256
from sbeval.errors import UserError
from sbeval.keeping.writing import written_beside
from sbeval.processes.ranks import is_first_process
from sbeval.training import record
from sbeval.training.distributed import prepare, process_count, whole_model
from sbeval.training.losses import Loss, next_token_loss
from sbeval.training.recipe import TrainingSettings
from sbeval.training.trainer import WindowTrainer, last_complete_state, schedule_factor, training_arguments
from sbeval.training.watch import RunWatch
from sbeval.training.windows import TrainingWindows


class RunOptions(TypedDict, total=False):
    """What a command may say of a run beside its settings, see `TrainingRun`."""

    max_seconds: float | None
    command: str
    fsdp: bool
    context_parallel: int


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """What one command is to do in a run's folder.

    Attributes:
        out: the folder, claimed by this command alone (`claim`): `states/`, `training_log.jsonl`, `runs.jsonl`,
            `run.json`.
        max_seconds: stop with a resumable state after this time; None trains to the end.
        command: command line for the record.
        fsdp: shard weights, gradients and the optimizer over the processes.
        context_parallel: processes that share a window.
        started: `time.monotonic()` when the command started.
    """

    out: Path
    settings: TrainingSettings
    _: dataclasses.KW_ONLY
    max_seconds: float | None = None
    command: str = ""
    fsdp: bool = False
    context_parallel: int = 1
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def windows(self) -> int:
        """Windows seen over the whole run."""
        optimization = self.settings.optimization
        return optimization.steps * optimization.batch_tokens // self.settings.length_tokens

    def check_epochs(self, windows: TrainingWindows, tokens: int, *, remedy: str) -> None:
        """Refuses a run that sees windows of the text twice."""
        if windows.epochs > 1:
            optimization = self.settings.optimization
            raise UserError(
                f"Expected a text of {optimization.steps * optimization.batch_tokens:,} tokens for "
                f"{optimization.steps:,} steps of {optimization.batch_tokens:,} tokens, found {tokens:,} tokens: the "
                f"run would read the text {windows.epochs:,.2f} times; give more text, {remedy}"
            )

    def train(self, model: Any, windows: TrainingWindows, loss: Loss = next_token_loss) -> Any | None:
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
            with record.full_disk_named(self.out):
                record.trim_log(self.out / record.CURVE_FILE, first_step)
        earlier = [
            command | {"last_step": min(command["last_step"], first_step)}
            for command in record.read_lines(self.out / record.COMMANDS_FILE)
        ]

        def note(step: int) -> None:
            record.write_lines(self.out / record.COMMANDS_FILE, [*earlier, self._this_command(first_step, step)])

        kind = type(model)
        batch_tokens = optimization.batch_tokens
        watch = RunWatch(self.out, note, batch_tokens=batch_tokens, started=self.started, max_seconds=self.max_seconds)
        shared = {"context_parallel": self.context_parallel}
        trainer = WindowTrainer(
            factor=schedule_factor(optimization),
            window_loss=loss,
            model=model,
            args=training_arguments(self.settings, self.out / "states", fsdp=self.fsdp, **shared),
            train_dataset=windows,
            callbacks=[watch],
            **shared,
        )
        prepare(trainer, state)
        watch.trainer = trainer
        trainer.remove_callback(PrinterCallback)  # the watch prints
        if first_step >= steps and state is not None:
            model.load_state_dict(kind.from_pretrained(state).state_dict())
            return model
        with record.full_disk_named(self.out), without_bars():
            trainer.train(resume_from_checkpoint=str(state) if state else None)
        if (bad_step := trainer.bad_step()) is not None:
            kept, again = "no state had been saved before", ""
            if good := last_complete_state(self.out / "states"):
                kept = f"the last good state is kept in {good}"
                again = " with another --out"
            raise UserError(
                f"Expected a finite loss and finite weights, found NaN or infinity at step {bad_step}; {kept}: lower "
                f"the learning rate and start again{again}"
            )
        if is_first_process():
            last_step = trainer.state.global_step
            with record.full_disk_named(self.out):
                note(last_step)
            if watch.out_of_time:
                print(f"stopped at step {last_step} of {steps} with its state saved; run the same command to go on")
        return None if watch.out_of_time else whole_model(trainer, kind)

    def _this_command(self, first_step: int, last_step: int) -> dict[str, Any]:
        """This command's share of the run; of several processes, the memory is the first's."""
        on_gpu = torch.cuda.is_available()
        return {
            "command": self.command,
            "first_step": first_step,
            "last_step": last_step,
            "seconds": round(time.monotonic() - self.started, 1),
            "gpu": torch.cuda.get_device_name() if on_gpu else None,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
            "processes": process_count(),
        }

    def finish(
        self,
        model: Any,
        tokenizer: Any,
        folder: Path,
        windows: TrainingWindows,
        *,
        facts: Mapping[str, Any],
        data: Mapping[str, Any],
        dtype: torch.dtype,
        parent: Path | None = None,
        measured: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Writes weights, configuration, tokenizer and record as one Hugging Face folder, which appears whole.

        The model is left in `dtype`. The record begins with `facts` of the recipe or the extension, `data` in it is
        that of the token arrays, and what is `measured` once the weights are saved ends it. What `parent` was trained
        on, this model was too.

        Raises:
            UserError: the disk is full; the run's states are kept.
        """
        if not is_first_process():
            return
        if folder.exists():
            raise UserError(f"Expected nothing at {folder} yet, found a file or folder: move it away and run again")
        with record.full_disk_named(self.out), without_bars(), written_beside(folder) as partial:
            tokenizer.save_pretrained(partial)
            model.to(dtype).save_pretrained(partial)
            commands = record.read_lines(self.out / record.COMMANDS_FILE)
            saved_tokenizer_sha256 = tokenizer_sha256(load_tokenizer(partial))
            keep_seen(windows.visited(), saved_tokenizer_sha256, partial, parent=parent)
            written = {
                **facts,
                "parameters": model.num_parameters(),
                "tokens_seen": self.settings.optimization.steps * self.settings.optimization.batch_tokens,
                "epochs": round(windows.epochs, 3),
                "unique_tokens": data["unique_tokens"],
                "commands": [command["command"] for command in commands],
                "runs": commands,
                "seconds": round(sum(command["seconds"] for command in commands), 1),
                "gpus": sorted({command["gpu"] for command in commands if command["gpu"]}),
                "versions": record.versions(),
                "data": data,
                "loss_curve": record.read_lines(self.out / record.CURVE_FILE),
                **measured(),
                "tokenizer_sha256": saved_tokenizer_sha256,
            }
            (partial / "training_record.json").write_text(json.dumps(written, indent=1), encoding="utf-8")
            for file in partial.iterdir():
                file.chmod(0o644)
