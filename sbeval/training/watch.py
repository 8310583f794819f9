"""What happens beside the steps of a run: its loss curve, signs of life, its end in time, and no broken state."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from sbeval.errors import time_text
from sbeval.processes.ranks import say
from sbeval.training.distributed import process_count, smallest_over_processes
from sbeval.training.record import COMPLETE_MARK, CURVE_FILE
from sbeval.training.trainer import WindowTrainer, remove_older_states

SECONDS_BETWEEN_SIGNS = 10.0
STEPS_BETWEEN_CLOCKS = 10
"""Of several processes: reading their clocks waits for the device."""


class RunWatch(TrainerCallback):
    """Keeps a run's loss curve, stops it in time, and never lets a broken state be saved.

    `saved` is told in the first process after which step a state was written.
    """

    def __init__(
        self, out: Path, saved: Callable[[int], None], *, batch_tokens: int, started: float, max_seconds: float | None
    ) -> None:
        self.trainer: WindowTrainer | None = None
        self.out_of_time = False
        self._out, self._batch_tokens = out, batch_tokens
        self._started, self._max_seconds = started, max_seconds
        self._saved = saved
        self._first_step = 0
        self._first_step_at = self._said_at = started

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Notes where and when this command's first step begins, and says how many there are."""
        self._first_step = state.global_step
        self._first_step_at = time.monotonic()
        tokens = self._batch_tokens
        say(
            f"steps {state.global_step + 1} to {state.max_steps} of {tokens:,} tokens each, "
            f"the loss every {min(args.logging_steps, state.max_steps):.0f}"
        )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Says how far a slow run is, and stops it, state saved, when its time is up."""
        now = time.monotonic()
        if state.global_step >= state.max_steps:
            control.should_log = True  # a run of fewer steps than lie between two losses shows one too
        if control.should_log:
            self._said_at = now
        elif state.global_step == self._first_step + 1 or now - self._said_at > SECONDS_BETWEEN_SIGNS:
            self._said_at = now
            say(f"step {state.global_step}/{state.max_steps}{self._left(state.max_steps, state.global_step)}")
        if self._max_seconds is not None and self._time_is_up(args.device, state.global_step):
            self.out_of_time = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True
        if control.should_save:
            self._stop_broken(control, weights_too=True)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Adds a point to the loss curve."""
        if not logs or "loss" not in logs or self._stop_broken(control) or not state.is_world_process_zero:
            return
        point = {
            "step": state.global_step,
            "tokens": state.global_step * self._batch_tokens,
            "loss_nats": logs["loss"],
            "gradient_norm": logs.get("grad_norm"),
            "learning_rate": logs["learning_rate"],
            "seconds": round(time.monotonic() - self._started, 2),
        }
        with (self._out / CURVE_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(point) + "\n")
        print(
            f"step {point['step']}/{state.max_steps}  loss {logs['loss']:.4f}  {point['seconds']:.0f} s"
            f"{self._left(state.max_steps, point['step'])}",
            flush=True,
        )

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Marks the state just written as complete, which an interrupted one is not, and removes older ones."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # every process has written its part
        if state.is_world_process_zero:
            # before the mark: once a state counts as complete, a kill must not leave its run unrecorded
            self._saved(state.global_step)
            mark = Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE_MARK
            mark.write_text(json.dumps({"step": state.global_step}), encoding="utf-8")
            remove_older_states(Path(args.output_dir))

    def _left(self, steps: int, done: int) -> str:
        """Returns ", about 340 s left", by the steps of this command so far; nothing where none is left."""
        now = time.monotonic()
        left_seconds = (steps - done) * (now - self._first_step_at) / max(1, done - self._first_step)
        if self._max_seconds is not None:
            left_seconds = min(left_seconds, self._max_seconds - (now - self._started))
        return f", about {time_text(left_seconds)} left" if left_seconds >= 1 else ""

    def _time_is_up(self, device: torch.device, step: int) -> bool:
        assert self._max_seconds is not None
        left_seconds = self._max_seconds - (time.monotonic() - self._started)
        if process_count() == 1:
            return left_seconds < 0
        # processes must stop at the same step: the first to run out of time decides; asking waits for the device
        due = step % STEPS_BETWEEN_CLOCKS == 0
        return due and smallest_over_processes(torch.tensor(left_seconds, device=device)) < 0

    def _stop_broken(self, control: TrainerControl, *, weights_too: bool = False) -> bool:
        """Stops a run whose loss or weights are no longer finite, its state unsaved; returns whether it is one."""
        assert self.trainer is not None
        if weights_too:
            self.trainer.note_weights()
        if self.trainer.bad_step() is None:
            return False
        control.should_save = False
        control.should_training_stop = True
        return True
