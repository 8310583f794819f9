"""`sbeval train RECIPE`: one training run, resumed where it stopped."""

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from sbeval.errors import UserError
from sbeval.training.recipe import from_mapping, read_mapping
from sbeval.training.record import RunPart, append_run, loss_curve, training_record, trim_log
from sbeval.training.settings import TrainRecipe
from sbeval.training.trainer import (
    RunWatch,
    WindowTrainer,
    last_complete_state,
    schedule_factor,
    training_arguments,
)
from sbeval.training.windows import TrainingWindows, load_arrays


def train(
    recipe: TrainRecipe,
    out: Path,
    *,
    max_seconds: float | None = None,
    data_folder: Path | None = None,
    command: str = "",
) -> Path | None:
    """Trains a model from the recipe, or goes on where an earlier call stopped.

    Args:
        recipe: the run.
        out: its folder: resumable states, the loss curve, and at the end `<recipe.name>/`, the checkpoint.
        max_seconds: stop with a resumable state after this much time; None trains to the end.
        data_folder: token arrays to read instead of the recipe's.
        command: command line for the record.

    Returns:
        The checkpoint's folder, or None where time ran out first.

    Raises:
        UserError: data and recipe do not fit, `out` holds another run, or the loss was not finite.
    """
    from transformers import set_seed

    from sbeval.models import SbevalConfig, SbevalForCausalLM

    started = time.monotonic()
    arrays = load_arrays(data_folder or Path(recipe.data.folder))
    steps = recipe.optimization.steps
    windows = TrainingWindows(
        arrays.tokens,
        arrays.recall,
        length_tokens=recipe.length_tokens,
        windows=steps * recipe.optimization.batch_tokens // recipe.length_tokens,
        recall_share=recipe.data.recall_share,
        seed=recipe.data.seed,
    )
    _claim(out, recipe, arrays.record)
    set_seed(recipe.seed)
    model = SbevalForCausalLM(SbevalConfig(**recipe.model))
    arguments = training_arguments(
        recipe.optimization,
        length_tokens=recipe.length_tokens,
        states=out / "states",
        precision=recipe.precision,
        seed=recipe.seed,
        log_every_steps=recipe.log_every_steps,
        save_every_steps=recipe.save_every_steps,
    )
    state = last_complete_state(out / "states")
    first_step = int(state.name.rpartition("-")[2]) if state else 0
    trim_log(out / "training_log.jsonl", first_step)
    watch = RunWatch(
        log=out / "training_log.jsonl",
        batch_tokens=recipe.optimization.batch_tokens,
        max_seconds=max_seconds,
        started=started,
    )
    trainer = WindowTrainer(
        factor=schedule_factor(recipe.optimization), model=model, args=arguments, train_dataset=windows, callbacks=[watch]
    )
    watch.trainer = trainer
    if first_step < steps:
        trainer.train(resume_from_checkpoint=str(state) if state else None)
        last_step = trainer.state.global_step
        if (bad_step := trainer.bad_step()) is not None:
            raise UserError(
                f"expected a finite loss, found NaN or infinity at step {bad_step}; the last good state in "
                f"{out / 'states'} is kept: lower the learning rate and start again"
            )
        append_run(
            out / "runs.jsonl",
            RunPart(
                command=command,
                first_step=first_step,
                last_step=last_step,
                seconds=round(time.monotonic() - started, 1),
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                peak_memory_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
            ),
        )
        if watch.out_of_time:
            print(f"stopped at step {last_step} of {steps} with its state saved; run the same command to go on", flush=True)
            return None
    elif state is not None:
        model = SbevalForCausalLM.from_pretrained(state)
    checkpoint = out / recipe.name
    if trainer.is_world_process_zero():
        _write_checkpoint(model, checkpoint, arrays.tokenizer)
        record = training_record(
            recipe=recipe,
            data=arrays.record,
            epochs=windows.epochs,
            parameters=model.num_parameters(),
            runs=out / "runs.jsonl",
            curve=loss_curve(out / "training_log.jsonl"),
        )
        (checkpoint / "training_record.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
        print(f"{checkpoint}: trained on {record['tokens_seen']} tokens", flush=True)
    return checkpoint


def _claim(out: Path, recipe: TrainRecipe, data: Mapping[str, Any]) -> None:
    """Writes what this folder's run is; a folder of another run is refused, since its states would be resumed."""
    from sbeval.training.record import as_json

    wanted = json.dumps({"recipe": as_json(recipe), "tokens_sha256": data["tokens_sha256"]}, indent=1, sort_keys=True)
    file = out / "run.json"
    if file.is_file() and file.read_text(encoding="utf-8") != wanted:
        raise UserError(f"expected {out} to hold the run of this recipe and data, found another; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(wanted, encoding="utf-8")


def _write_checkpoint(model: Any, folder: Path, tokenizer: Path) -> None:
    # copied first, so that the model's own files win
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of a training run."""
    parser = argparse.ArgumentParser(prog="sbeval train", description=__doc__)
    parser.add_argument("recipe", help="recipe file, or the name of a shipped recipe such as demo_rope")
    parser.add_argument("--out", type=Path, default=None, help="folder of the run (default: build/runs/<name>)")
    parser.add_argument("--data", type=Path, default=None, help="token arrays to read instead of the recipe's")
    parser.add_argument("--max-seconds", type=float, default=None, help="stop with a resumable state after this time")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting: optimization.learning_rate=1e-3"
    )
    options = parser.parse_args(arguments)
    try:
        mapping, file = read_mapping(options.recipe)
        recipe = from_mapping(TrainRecipe, _with_changes(mapping, options.set), where=file.name)
        train(
            recipe,
            options.out or Path("build/runs") / recipe.name,
            max_seconds=options.max_seconds,
            data_folder=options.data,
            command=shlex.join(["sbeval", "train", *(sys.argv[1:] if arguments is None else arguments)]),
        )
    except UserError as error:
        raise SystemExit(f"Error: {error}") from None


def _with_changes(mapping: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    for change in changes:
        path, equals, value = change.partition("=")
        if not equals:
            raise UserError(f"expected --set KEY=VALUE, found {change!r}")
        place = mapping
        *parents, last = path.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise UserError(f"expected --set to name a setting, found {path!r}: {parent!r} holds no settings")
        place[last] = yaml.safe_load(value)
    return mapping


if __name__ == "__main__":
    main()
