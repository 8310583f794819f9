"""The options of `sbeval train` and `sbeval extend`; torch is imported once they have been read."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from sbeval.ending import EVALUATE, say_next
from sbeval.errors import UserError
from sbeval.foreign_files import parse_yaml
from sbeval.settings import Count, read_value
from sbeval.training.recipe import Documents, Extension, OptimizationSettings, TrainRecipe, read_mapping


def train_command(arguments: Sequence[str] | None = None) -> None:
    """Command line of a training run."""
    parser = argparse.ArgumentParser(prog="sbeval train", description="One training run, resumed where it stopped.")
    parser.add_argument("recipe", help="recipe file, or the name of a shipped recipe such as demo_rope")
    parser.add_argument("--out", type=Path, default=None, help="folder of the run (default: build/runs/<name>)")
    parser.add_argument("--data", type=Path, default=None, help="token arrays to read instead of the recipe's")
    parser.add_argument("--max-seconds", type=float, default=None, help="stop with a resumable state after this time")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting: optimization.learning_rate=1e-3",
    )
    parser.add_argument("--allow-repeat", action="store_true", help="let the run be more than one epoch")
    parser.add_argument("--replace", action="store_true", help="move what else the folder holds to NAME.old-TIME")
    parser.add_argument("--fsdp", action="store_true", help="shard weights over the processes of accelerate launch")
    options = parser.parse_args(arguments)
    mapping, file = read_mapping(options.recipe)
    changes = [*options.set, *(["data.allow_repeat=true"] if options.allow_repeat else [])]
    recipe = TrainRecipe.read(_with_changes(mapping, changes), place="the recipe", source=file.name)
    from sbeval.training.train import train

    checkpoint = train(
        recipe,
        options.out or Path("build/runs") / recipe.name,
        max_seconds=options.max_seconds,
        data_folder=options.data,
        command=shlex.join(["sbeval", "train", *(sys.argv[1:] if arguments is None else arguments)]),
        fsdp=options.fsdp,
        replace=options.replace,
    )
    _say_next(checkpoint)


def extend_command(arguments: Sequence[str] | None = None) -> None:
    """Command line of a context extension."""
    parser = argparse.ArgumentParser(
        prog="sbeval extend", description="Continue training at a longer context (Tan et al. 2025, appendix C.1)."
    )
    parser.add_argument("checkpoint", help="folder or hub id of the checkpoint to extend")
    parser.add_argument("--data", type=Path, required=True, help="token arrays, a .txt or .jsonl file, or a folder")
    parser.add_argument("--context", type=int, required=True, help="new context in tokens")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--steps", type=int, default=6250, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=4_194_304, help="of one step (default: %(default)s)")
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=None, help="of one forward pass (default: one window)"
    )
    parser.add_argument("--learning-rate", type=float, default=1.25e-4, help="at its peak (default: %(default)s)")
    parser.add_argument("--warmup-steps", type=int, default=150, help="until the peak (default: %(default)s)")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument(
        "--documents", choices=get_args(Documents), default="separate", help="may documents see each other?"
    )
    parser.add_argument("--rope-scaling", default=None, help="scaling to train with, such as dynamic:4")
    parser.add_argument("--allow-repeat", action="store_true", help="let the run be more than one epoch")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every-steps", type=int, default=250)
    parser.add_argument("--log-every-steps", type=int, default=10)
    parser.add_argument("--max-seconds", type=float, default=None, help="stop with a resumable state after this time")
    parser.add_argument("--replace", action="store_true", help="move what else the folder holds to NAME.old-TIME")
    parser.add_argument("--fsdp", action="store_true", help="shard weights over the processes of accelerate launch")
    options = parser.parse_args(arguments)
    for name in ("context", "log_every_steps", "save_every_steps"):
        read_value(Count, getattr(options, name), name=f"--{name.replace('_', '-')}")
    micro_batch_tokens = options.micro_batch_tokens
    if micro_batch_tokens is None and options.batch_tokens % options.context == 0:
        micro_batch_tokens = options.context
    extension = Extension(
        checkpoint=options.checkpoint,
        data=options.data,
        context_tokens=options.context,
        optimization=OptimizationSettings(
            learning_rate=options.learning_rate,
            total_tokens=options.steps * options.batch_tokens,
            batch_tokens=options.batch_tokens,
            micro_batch_tokens=micro_batch_tokens,
            warmup_steps=options.warmup_steps,
            schedule="extension",
            weight_decay=options.weight_decay,
        ),
        documents=options.documents,
        rope_scaling=options.rope_scaling,
        allow_repeat=options.allow_repeat,
        gradient_checkpointing=options.gradient_checkpointing,
        precision=options.precision,
        seed=options.seed,
        log_every_steps=options.log_every_steps,
        save_every_steps=options.save_every_steps,
    )
    command = shlex.join(["sbeval", "extend", *(sys.argv[1:] if arguments is None else arguments)])
    from sbeval.training.extend import extend

    checkpoint = extend(
        extension,
        options.out,
        max_seconds=options.max_seconds,
        command=command,
        fsdp=options.fsdp,
        replace=options.replace,
    )
    _say_next(checkpoint)


def _say_next(checkpoint: Path | None) -> None:
    if checkpoint is not None:
        say_next(EVALUATE.format(shlex.quote(str(checkpoint))))


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
        try:
            place[last] = parse_yaml(value)
        except UserError as error:
            raise UserError(f"expected --set {path}= with a value in YAML, found {value!r} ({error})") from None
    return mapping
