"""One training run in its folder: resumes from the newest state, trains, and writes the final checkpoint."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from accelerate.utils.memory import should_reduce_batch_size
from transformers import PrinterCallback

from sbeval.checkpoints.quiet import without_bars
from sbeval.corpora.seen import write_training_spans
from sbeval.corpora.tokenizers import load_tokenizer, tokenizer_sha256
from sbeval.errors import UserError, first_line
from sbeval.keeping.writing import written_beside
from sbeval.processes.ranks import is_first_process
from sbeval.training import record
from sbeval.training.distributed import gathered_model, prepare, process_count
from sbeval.training.losses import Loss, next_token_loss
from sbeval.training.recipe import TrainingSettings
from sbeval.training.trainer import WindowTrainer, last_complete_state, schedule_factor, training_arguments
from sbeval.training.watch import RunWatch
from sbeval.training.windows import TrainingWindows


class RunOptions(TypedDict, total=False):
    """Optional arguments of `TrainingRun` that the commands pass on."""

    max_seconds: float | None
    command: str
    fsdp: bool
    context_parallel: int


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """A training run, as one command starts or resumes it.

    Attributes:
        out: the run's folder, claimed by this command (`claim`). It holds `states/`, `training_log.jsonl`,
            `runs.jsonl` and `run.json`.
        settings: the recipe or extension.
        max_seconds: save a resumable state and stop after this time; None trains to the end.
        command: command line for the record.
        fsdp: shard weights, gradients and optimizer state over the ranks.
        context_parallel: ranks that share a window.
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
        """Number of windows of the whole run."""
        optimization = self.settings.optimization
        return optimization.steps * optimization.batch_tokens // self.settings.length_tokens

    def check_epochs(self, windows: TrainingWindows, tokens: int, *, remedy: str) -> None:
        """Checks that the run reads its text of `tokens` tokens at most once; the error ends with `remedy`."""
        if windows.epochs > 1:
            optimization = self.settings.optimization
            raise UserError(
                f"{optimization.steps:,} steps of {optimization.batch_tokens:,} tokens need "
                f"{optimization.steps * optimization.batch_tokens:,} tokens of text, found {tokens:,}: the run would "
                f"read the text {windows.epochs:,.2f} times; give more text, {remedy}"
            )

    def train(self, model: Any, windows: TrainingWindows, loss: Loss = next_token_loss) -> Any | None:
        """Trains the model from the newest state, or from its initial weights if there is no state.

        Args:
            model: the model; it is trained in place.
            windows: token windows in training order.
            loss: loss function of the model and windows [windows, length + 1].

        Returns:
            The trained model, on rank 0 with full weights; None if the time limit ended the run first.

        Raises:
            UserError: loss or weights are not finite, disk or memory is full, or FSDP runs on a single rank.
        """
        with self._memory_named():
            return self._train(model, windows, loss)

    @contextlib.contextmanager
    def _memory_named(self) -> Iterator[None]:
        """If memory runs out inside the block, raises an error that says which setting the user can lower."""
        try:
            yield
        except Exception as error:
            if not (isinstance(error, torch.OutOfMemoryError | MemoryError) or should_reduce_batch_size(error)):
                raise
            optimization = self.settings.optimization
            tokens = optimization.micro_batch_tokens or optimization.batch_tokens // process_count()
            *remedies, last = self.settings.memory_remedies()
            state = last_complete_state(self.out / "states")
            again = " with another --out" if state else ""  # a run can be resumed only with the same settings
            raise UserError(
                f"Expected memory for the model, its optimizer and a pass of {tokens:,} tokens, found none left "
                f"({first_line(error)}): {', '.join(remedies)} or {last}, and start again{again}."
            ) from error

    def _train(self, model: Any, windows: TrainingWindows, loss: Loss) -> Any | None:
        if self.fsdp and process_count() == 1:
            raise UserError("--fsdp needs several ranks, found one; start the command with `accelerate launch`")
        optimization = self.settings.optimization
        steps = optimization.steps
        state = last_complete_state(self.out / "states")
        first_step = int(state.name.rpartition("-")[2]) if state else 0
        if is_first_process():
            with record.full_disk_named(self.out):
                record.trim_log(self.out / record.CURVE_FILE, first_step)
        earlier_commands = [
            command | {"last_step": min(command["last_step"], first_step)}
            for command in record.read_lines(self.out / record.COMMANDS_FILE)
        ]

        def record_commands(step: int) -> None:
            commands = [*earlier_commands, self._this_command(first_step, step)]
            record.write_lines(self.out / record.COMMANDS_FILE, commands)

        model_class = type(model)
        batch_tokens = optimization.batch_tokens
        watch = RunWatch(
            self.out,
            record_commands,
            batch_tokens=batch_tokens,
            started=self.started,
            max_seconds=self.max_seconds,
        )
        trainer = WindowTrainer(
            factor=schedule_factor(optimization),
            window_loss=loss,
            model=model,
            args=training_arguments(
                self.settings, self.out / "states", fsdp=self.fsdp, context_parallel=self.context_parallel
            ),
            train_dataset=windows,
            callbacks=[watch],
            context_parallel=self.context_parallel,
        )
        prepare(trainer, state)
        watch.trainer = trainer
        trainer.remove_callback(PrinterCallback)  # RunWatch prints the losses
        if first_step >= steps and state is not None:
            model.load_state_dict(model_class.from_pretrained(state).state_dict())
            return model
        with record.full_disk_named(self.out), without_bars():
            trainer.train(resume_from_checkpoint=str(state) if state else None)
        if (non_finite_step := trainer.non_finite_step()) is not None:
            complete_state = last_complete_state(self.out / "states")
            if complete_state is None:
                saved, restart = "no state had been saved before", "start again"
            else:
                saved, restart = f"the last complete state is in {complete_state}", "start again with another --out"
            raise UserError(
                f"Loss or weights became NaN or infinity at step {non_finite_step}; {saved}: lower the learning rate "
                f"and {restart}"
            )
        if is_first_process():
            last_step = trainer.state.global_step
            with record.full_disk_named(self.out):
                record_commands(last_step)
            if watch.out_of_time:
                print(f"stopped at step {last_step} of {steps}, state saved; run the same command to resume")
        return None if watch.out_of_time else gathered_model(trainer, model_class)

    def _this_command(self, first_step: int, last_step: int) -> dict[str, Any]:
        """Returns the line that this command adds to `runs.jsonl`; the peak memory is that of rank 0."""
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
        """Writes the final checkpoint on rank 0, atomically: weights, configuration, tokenizer, training record.

        Args:
            model: the trained model; it is converted to `dtype` in place.
            tokenizer: its tokenizer.
            folder: new folder of the checkpoint.
            windows: the windows that the run has trained on.
            facts: fields of the training record about the recipe or the extension.
            data: record of the token arrays.
            dtype: dtype of the saved weights.
            parent: folder of the checkpoint that was extended; the hashes of its training text are copied.
            measured: called after the weights are saved; returns further fields of the training record.

        Raises:
            UserError: the disk is full, or `folder` exists. The run's states are kept.
        """
        if not is_first_process():
            return
        if folder.exists():
            raise UserError(f"{folder} exists and would be overwritten: move it away and run again")
        with record.full_disk_named(self.out), without_bars(), written_beside(folder) as partial:
            tokenizer.save_pretrained(partial)
            model.to(dtype).save_pretrained(partial)
            commands = record.read_lines(self.out / record.COMMANDS_FILE)
            saved_tokenizer_sha256 = tokenizer_sha256(load_tokenizer(partial))
            write_training_spans(windows.visited(), saved_tokenizer_sha256, partial, parent=parent)
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
