"""`python -m research.paper_experiments.mqrar`: trains small models on associative recall (Tan et al. 2025, 5.1).

    python -m research.paper_experiments.mqrar --attention stickbreaking --pairs 64 --out build/mqrar/sb_64.json

Models of two layers, 256 dimensions and one head, one for each number of pairs, on sequences that never repeat. The
learning rates are tried in the order given; a run ends when 99 % of the answers are right on the task's own sequences
(`sbeval.tasks.recall.sequences`, another seed), and no further rate is tried then, since the best counts. The
table says which were run. With `--picture` the attention weights on one sequence are written beside the table.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from research.paper_experiments.attention_picture import attention_weights
from research.paper_experiments.recall_batches import RecallBatches
from sbeval.attention.api import Implementation
from sbeval.errors import UserError
from sbeval.tasks.recall.sequences import LENGTH_TOKENS, VOCABULARY, Mqrar
from sbeval.training.trainer import cosine

SOLVED = 0.99
LEARNING_RATES = (10 ** (-10 / 3), 10 ** (-8 / 3), 1e-2, 1e-4)
TEST_SEED = 42
PICTURE_SLOTS_A_PAIR = 4
LOADERS = 2
"""Processes that make batches: one takes 5 ms of a core, a step on a GPU no less."""
BATCHES_AHEAD = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallRun:
    """One model and how it is trained.

    Attributes:
        attention: "stickbreaking" or "rope".
        pairs: keys in a sequence.
        length_tokens: of a sequence.
        vocabulary: token ids.
        hidden_size: width; the one head is as wide.
        layers: blocks.
        learning_rate: at its peak.
        steps: most optimizer steps.
        batch_sequences: of one step.
        test_sequences: on which accuracy is measured.
        test_every_steps: distance of the measurements.
        max_seconds: end a run after this time.
        seed: of initial weights and data.
        warmup_steps: until the learning rate is at its peak; None takes a tenth of `steps`.
        implementation: of stick-breaking.
        precision: of matrix products and attention on a GPU ("bfloat16" or "float32"); weights, the residual stream
            and the loss are fp32 in both.
    """

    attention: str
    pairs: int
    length_tokens: int = LENGTH_TOKENS
    vocabulary: int = VOCABULARY
    hidden_size: int = 256
    layers: int = 2
    learning_rate: float
    steps: int
    batch_sequences: int = 64
    test_sequences: int = 200
    test_every_steps: int = 100
    max_seconds: float | None = None
    seed: int = 0
    warmup_steps: int | None = None
    implementation: Implementation = "auto"
    precision: str = "bfloat16"

    @property
    def setting(self) -> Mqrar:
        """The task."""
        return Mqrar(length_tokens=self.length_tokens, pairs=self.pairs, vocabulary=self.vocabulary)


def new_model(run: RecallRun) -> Any:
    """Builds the model with its initial weights."""
    from sbeval.models import SbevalConfig, SbevalForCausalLM

    set_seed(run.seed)
    model: Any = SbevalForCausalLM(
        SbevalConfig(
            attention=run.attention,
            vocab_size=run.vocabulary,
            hidden_size=run.hidden_size,
            intermediate_size=8 * run.hidden_size // 3 // 16 * 16,
            num_hidden_layers=run.layers,
            num_attention_heads=1,
            training_length_tokens=run.length_tokens,
        )
    )
    if run.attention == "stickbreaking":
        model.set_kernels(impl=run.implementation)
    return model


def asked_logits(model: Any, input_ids: Tensor, positions: Tensor, precision: str) -> Tensor:
    """Returns logits [B, T, V] at positions [B, T]; the head is run at no other.

    The Trainer's own mixed precision wraps the model's `forward`, which is not what is called here.
    """
    with torch.autocast("cuda", torch.bfloat16, enabled=input_ids.is_cuda and precision == "bfloat16"):
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        asked: Tensor = model.head_logits(hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1])))
    return asked


TestBatch = tuple[Tensor, Tensor, Tensor]
"""Inputs [B, L], positions [B, T] and targets [B, T]."""


def test_batches(run: RecallRun, device: torch.device) -> list[TestBatch]:
    """Makes the task's own sequences, once for all measurements of a run."""
    sequences = [run.setting.sequence(TEST_SEED, index) for index in range(run.test_sequences)]
    parts = [
        zip(*sequences[first : first + run.batch_sequences], strict=True)
        for first in range(0, len(sequences), run.batch_sequences)
    ]
    stacked = [[torch.from_numpy(np.stack(arrays)).to(device) for arrays in part] for part in parts]
    return [(inputs, positions, targets) for inputs, positions, targets in stacked]


@torch.no_grad()
def accuracy(model: Any, run: RecallRun, batches: Sequence[TestBatch]) -> float:
    """Returns the share of right answers."""
    training = model.training
    model.eval()
    guesses = [asked_logits(model, inputs, positions, run.precision).argmax(-1) for inputs, positions, _ in batches]
    right = torch.cat([(guess == batch[2]).flatten() for guess, batch in zip(guesses, batches, strict=True)])
    model.train(training)
    return float(right.double().mean())


class RecallTrainer(Trainer):
    """Trainer on batches that the dataset has put together."""

    def __init__(self, run: RecallRun, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.run = run

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Returns the mean loss in nats over the answers."""
        del return_outputs, num_items_in_batch
        logits = asked_logits(model, inputs["input_ids"], inputs["positions"], self.run.precision)
        return F.cross_entropy(logits.float().flatten(0, 1), inputs["targets"].flatten())

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Warms up, then half a cosine to zero."""
        if self.lr_scheduler is None:
            given = self.run.warmup_steps
            warmup = max(1, num_training_steps // 10 if given is None else given)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer if optimizer is not None else self.optimizer,  # type: ignore[arg-type]
                lambda step: cosine(step, steps=num_training_steps, warmup_steps=warmup),
            )
        return self.lr_scheduler


class UntilSolved(TrainerCallback):
    """Measures accuracy on the way, and stops the run where it is solved or its time is up."""

    def __init__(self, model: Any, run: RecallRun) -> None:
        self.curve: list[dict[str, float]] = []
        self._model, self._run, self._started = model, run, time.monotonic()
        self._tests: list[TestBatch] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measures at every `test_every_steps`, and at the end."""
        seconds = time.monotonic() - self._started
        out_of_time = self._run.max_seconds is not None and seconds > self._run.max_seconds
        if state.global_step % self._run.test_every_steps and state.global_step < self._run.steps and not out_of_time:
            return
        self._tests = self._tests or test_batches(self._run, self._model.device)
        right = accuracy(self._model, self._run, self._tests)
        self.curve.append({"step": state.global_step, "accuracy": right, "seconds": round(seconds, 1)})
        print(f"  step {state.global_step}  accuracy {right:.4f}  {seconds:.0f} s", flush=True)
        if right >= SOLVED or out_of_time:
            control.should_training_stop = True


def train(run: RecallRun, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Trains one model.

    Args:
        run: what to train.
        folder: for the Trainer, which writes nothing there.

    Returns:
        The model, and what came out: the settings, the curve, the steps taken and the last accuracy.
    """
    model = new_model(run)
    watch = UntilSolved(model, run)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=run.steps,
        per_device_train_batch_size=run.batch_sequences,
        learning_rate=run.learning_rate,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch_fused" if torch.cuda.is_available() else "adamw_torch",
        use_cpu=not torch.cuda.is_available(),
        seed=run.seed,
        save_strategy="no",
        logging_strategy="no",
        # it would wait for the GPU at every step
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        dataloader_num_workers=LOADERS if torch.cuda.is_available() else 0,
        dataloader_prefetch_factor=BATCHES_AHEAD if torch.cuda.is_available() else None,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = RecallTrainer(
        run,
        model=model,
        args=arguments,
        train_dataset=RecallBatches(run.setting, seed=run.seed, count=run.steps * run.batch_sequences),
        data_collator=lambda batch: batch[0],
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    last = watch.curve[-1]
    return model, {
        **dataclasses.asdict(run),
        "steps_taken": last["step"],
        "sequences_seen": last["step"] * run.batch_sequences,
        "accuracy": last["accuracy"],
        "solved": last["accuracy"] >= SOLVED,
        "seconds": last["seconds"],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "curve": watch.curve,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of one number of pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=("stickbreaking", "rope"), required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; runs it holds already are not done again")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=LEARNING_RATES)
    parser.add_argument("--picture", action="store_true", help="write the best model's attention on one sequence")
    for field in dataclasses.fields(RecallRun):
        if field.name not in ("attention", "pairs", "learning_rate"):
            kind = {"max_seconds": float, "implementation": str, "precision": str}.get(field.name, int)
            default = 3000 if field.name == "steps" else field.default
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=default)
    options = vars(parser.parse_args(arguments))
    out, rates, picture = options.pop("out"), options.pop("learning_rates"), options.pop("picture")
    found = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else []
    out.parent.mkdir(parents=True, exist_ok=True)
    best = -1.0
    for rate in rates:
        run = RecallRun(**options, learning_rate=rate)
        done = next((one for one in found if dataclasses.asdict(run).items() <= one.items()), None)
        if done is None:
            print(f"{run.attention}, {run.pairs} pairs, learning rate {rate:.2e}", flush=True)
            model, done = train(run, out.parent / "trainer")
            found.append(done)
            out.write_text(json.dumps(found, indent=1), encoding="utf-8")
            if picture and done["accuracy"] > best:
                inputs, weights = attention_weights(model.cpu(), _short_sequence(run))
                np.savez_compressed(out.with_suffix(".npz"), inputs=inputs, weights=weights)
        best = max(best, done["accuracy"])
        if done["solved"]:
            break


def _short_sequence(run: RecallRun) -> Tensor:
    """A sequence with few repeats a key, so that single weights can be seen."""
    short = dataclasses.replace(run.setting, length_tokens=min(run.length_tokens, PICTURE_SLOTS_A_PAIR * 2 * run.pairs))
    return torch.from_numpy(short.sequence(TEST_SEED, 0).inputs_L)[None]


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
