"""The Trainer callback of a run: loss curve, progress messages, time limit, and no state with non-finite weights."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from sbeval.errors import time_text
from sbeval.processes.ranks import print_on_rank_0
from sbeval.training.distributed import minimum_over_ranks, process_count
from sbeval.training.record import COMPLETE_MARK, CURVE_FILE
from sbeval.training.trainer import WindowTrainer, remove_older_states

SECONDS_BETWEEN_SIGNS = 10.0
STEPS_BETWEEN_CLOCKS = 10
"""With several ranks the time limit is checked only once in so many steps, since the check waits for the device."""


class RunWatch(TrainerCallback):
    """Records the loss curve and prints progress; stops the run at the time limit or if loss or weights are not finite.

    Args:
        out: folder of the run.
        saved: called on rank 0 with the step at which a state was written, before the state counts as complete.
        batch_tokens: number of tokens in one optimizer step.
        started: `time.monotonic()` when the command started.
        max_seconds: time limit of the command, None for none.
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
        self._first_step_at = self._last_print_at = started

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stores the step and the time at which this command starts, and prints how many steps follow."""
        self._first_step, self._first_step_at = state.global_step, time.monotonic()
        tokens = self._batch_tokens
        print_on_rank_0(
            f"steps {state.global_step + 1} to {state.max_steps} of {tokens:,} tokens each, "
            f"with the loss every {min(args.logging_steps, state.max_steps):.0f} steps"
        )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Prints the progress of a slow run; at the time limit, has the Trainer save a state and stop."""
        now = time.monotonic()
        if state.global_step >= state.max_steps:
            control.should_log = True  # a run shorter than logging_steps logs one loss too
        if control.should_log:
            self._last_print_at = now
        elif state.global_step == self._first_step + 1 or now - self._last_print_at > SECONDS_BETWEEN_SIGNS:
            self._last_print_at = now
            print_on_rank_0(
                f"step {state.global_step}/{state.max_steps}{self._left(state.max_steps, state.global_step)}"
            )
        if self._max_seconds is not None and self._time_is_up(args.device, state.global_step):
            self.out_of_time = state.global_step < state.max_steps
            control.should_save = control.should_training_stop = True
        if control.should_save:
            self._stop_broken(control, weights_too=True)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Appends a point to the loss curve and prints it."""
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
        """Marks the new state as complete once all ranks have written it, and removes older states."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # wait until every rank has written its files
        if state.is_world_process_zero:
            # record the state before it is marked as complete: the process may be killed in between, and a complete
            # state must be in the record
            self._saved(state.global_step)
            mark = Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE_MARK
            mark.write_text(json.dumps({"step": state.global_step}), encoding="utf-8")
            remove_older_states(Path(args.output_dir))

    def _left(self, steps: int, done: int) -> str:
        """Returns ", about 340 s left", estimated from this command's steps so far; "" below one second."""
        now = time.monotonic()
        left_seconds = (steps - done) * (now - self._first_step_at) / max(1, done - self._first_step)
        if self._max_seconds is not None:
            left_seconds = min(left_seconds, self._max_seconds - (now - self._started))
        return f", about {time_text(left_seconds)} left" if left_seconds >= 1 else ""

    def _time_is_up(self, device: torch.device, step: int) -> bool:
        """Whether the time limit has passed; the same answer on all ranks."""
        assert self._max_seconds is not None
        left_seconds = self._max_seconds - (time.monotonic() - self._started)
        if process_count() == 1:
            return left_seconds < 0
        # all ranks must stop at the same step: the first rank that runs out of time decides
        is_checked = step % STEPS_BETWEEN_CLOCKS == 0
        return is_checked and minimum_over_ranks(torch.tensor(left_seconds, device=device)) < 0

    def _stop_broken(self, control: TrainerControl, *, weights_too: bool = False) -> bool:
        """Stops the run, without saving a state, if a loss (or with `weights_too` a weight) was not finite.

        Returns whether the run was stopped.
        """
        assert self.trainer is not None
        if weights_too:
            self.trainer.note_weights()
        if self.trainer.non_finite_step() is None:
            return False
        control.should_save = False
        control.should_training_stop = True
        return True
