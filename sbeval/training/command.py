"""The command lines of `sbeval train` and `sbeval extend`. torch is imported only after the options are parsed."""

import argparse
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from sbeval.corpora.split import Split
from sbeval.corpora.tokenizers import load_tokenizer
from sbeval.errors import UserError
from sbeval.foreign_files import parse_yaml
from sbeval.hub_names import check_name, local_path
from sbeval.keeping.writing import whole_file
from sbeval.processes.next_step import deferring_next_step, evaluation_of_folder, print_next_step
from sbeval.processes.ranks import is_first_process
from sbeval.settings import Count, Patterns, Settings, read_value
from sbeval.sweep.definition import Sweep, SweepCheckpoint, SweepRun
from sbeval.sweep.execute import run_sweep
from sbeval.training import own_text
from sbeval.training import recipe as recipes
from sbeval.training.arrays import load_arrays
from sbeval.training.own_text import HELD_OUT_FILE
from sbeval.training.recipe import Extension, OptimizationSettings

_RECIPE = "recipe file, or the name of a shipped recipe such as demo_rope (default with --text: own_text)"
_REPORT = "evaluate the model on held-out text (one token in 20) and build a report page"
_WARMUP = "steps of linear warm-up (default: 150, at most a tenth of all steps)"
_CHANGE = "change a setting: optimization.learning_rate=1e-3"


def train_command(arguments: Sequence[str]) -> Path | None:
    """Runs `sbeval train`. Returns the results folder if `--report` is set and training has finished, else None."""
    parser = argparse.ArgumentParser(
        prog="sbeval train", description="Train a small model; an interrupted run resumes."
    )
    parser.add_argument("recipe", nargs="?", help=_RECIPE)
    parser.add_argument("--out", type=Path, help="folder of the run (default: build/runs/<name>)")
    text = parser.add_argument_group("your own text")
    text.add_argument(
        "--text", help="a .txt, .jsonl or .parquet file, a folder of them, or a hub data set (owner/name)"
    )
    text.add_argument(
        "--tokenizer", help="folder or hub id of a tokenizer (default: a BPE with 4,096 entries, trained on the text)"
    )
    text.add_argument(
        "--split", help='split documents: paragraph, "512 tokens", or a regular expression that separates them'
    )
    text.add_argument("--text-field", help="field or column that holds the text (default: text)")
    text.add_argument("--dataset-config", help="configuration of the hub data set")
    text.add_argument("--dataset-split", help="split of the hub data set (default: train)")
    text.add_argument("--report", action="store_true", help=_REPORT)
    parser.add_argument("--data", type=Path, help="token arrays to read instead of the recipe's")
    parser.add_argument("--max-seconds", type=float, help="save a resumable state and stop after this time")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=_CHANGE)
    parser.add_argument("--allow-repeat", action="store_true", help="allow more than one epoch")
    parser.add_argument("--replace", action="store_true", help="move other files in the folder to NAME.old-TIME")
    parser.add_argument(
        "--fsdp", action="store_true", help="shard weights over the ranks of `accelerate launch` (FSDP)"
    )
    options = parser.parse_args(arguments)
    _check_text_options(options)
    mapping, file = recipes.read_mapping(options.recipe or "own_text")
    changes = [*options.set, *(["data.allow_repeat=true"] if options.allow_repeat else [])]
    if options.text is None:
        folder = options.data
        mapping = _with_changes(mapping, changes)
    else:
        folder, mapping = _with_own_text(options, mapping, changes)
    recipe = recipes.TrainRecipe.read(mapping, place="the recipe", source=file.name)
    out = local_path(options.out or Path("build/runs") / recipe.name)
    load_arrays(folder or Path(recipe.data.folder))  # bad arrays are refused before torch is imported
    from sbeval.training.train import train  # imports torch: only after the checks above

    lengths = own_text.lengths_to_report(folder, recipe.length_tokens) if options.report else ()
    checkpoint = train(recipe, out, data_folder=folder, **_run_options(options, "train", arguments))
    if not options.report or checkpoint is None or not is_first_process():
        _print_next_command(checkpoint)
        return None
    held_out = out / "held_out" / own_text.name_of_text(options.text)  # the task takes its name from the folder
    held_out.mkdir(parents=True, exist_ok=True)
    with whole_file(held_out / HELD_OUT_FILE, "the held-out text", remedy="choose another --out") as copy:
        shutil.copyfile(folder / HELD_OUT_FILE, copy)
    return _evaluated(checkpoint, held_out, lengths)


def _evaluated(checkpoint: Path, text: Path, context_lengths: tuple[int, ...]) -> Path:
    """Evaluates a checkpoint on held-out text, in a subprocess. Returns the results folder."""
    run = SweepRun(
        name="held-out",
        tasks=("sb_text_stream", "sb_text_fixed_target"),
        context_lengths=context_lengths,
        # held-out documents may be shorter than a context, so targets are chosen from the joined text of all documents
        metadata={"data_path": str(text.resolve()), "context": "stream"},
    )
    evaluated = SweepCheckpoint(pretrained=str(checkpoint.resolve()))
    results = checkpoint.with_name("results")
    with deferring_next_step():
        failures = run_sweep(Sweep(checkpoints=(evaluated,), runs=(run,), output=str(results)))
    if failures:
        raise UserError(f"The evaluation for the report failed: {failures[0].reason}")
    return results


def extend_command(arguments: Sequence[str]) -> None:
    """Runs `sbeval extend`."""
    parser = argparse.ArgumentParser(
        prog="sbeval extend", description="Continue training at a longer context (Tan et al. 2025, appendix C.1)."
    )
    parser.add_argument("checkpoint", help="folder or hub id of the checkpoint to extend")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="token arrays, a .txt, .jsonl or .parquet file, a folder of them, or a hub data set",
    )
    parser.add_argument("--context", type=int, required=True, help="new context length in tokens")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--steps", type=int, default=6250, help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--batch-tokens", type=int, default=4_194_304, help="tokens of one optimizer step (default: %(default)s)"
    )
    parser.add_argument("--micro-batch-tokens", type=int, help="tokens of one forward pass (default: one window)")
    parser.add_argument(
        "--learning-rate", type=float, default=1.25e-4, help="peak learning rate (default: %(default)s)"
    )
    parser.add_argument("--warmup-steps", type=int, default=argparse.SUPPRESS, help=_WARMUP)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument(
        "--documents",
        choices=get_args(recipes.Documents),
        default="separate",
        help="whether attention crosses document boundaries: separate (default) or joined",
    )
    parser.add_argument("--rope-scaling", help="RoPE scaling to train with, such as dynamic:4")
    parser.add_argument("--allow-repeat", action="store_true", help="allow more than one epoch")
    parser.add_argument(
        "--allow-unread", metavar="true|PATTERN:PATTERN", help="tensors of the checkpoint that may stay unread"
    )
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every-steps", type=int, default=250)
    parser.add_argument("--log-every-steps", type=int, default=10)
    parser.add_argument("--max-seconds", type=float, help="save a resumable state and stop after this time")
    parser.add_argument("--replace", action="store_true", help="move other files in the folder to NAME.old-TIME")
    parser.add_argument(
        "--fsdp", action="store_true", help="shard weights over the ranks of `accelerate launch` (FSDP)"
    )
    parser.add_argument(
        "--context-parallel", type=int, default=1, help="number of ranks of `accelerate launch` that share one window"
    )
    options = parser.parse_args(arguments)
    allow_unread = read_value(Patterns | None, options.allow_unread, name="--allow-unread") or ()
    for name in ("context", "log_every_steps", "save_every_steps", "context_parallel"):
        read_value(Count, getattr(options, name), name=f"--{name.replace('_', '-')}")
    if options.micro_batch_tokens is None and options.batch_tokens % options.context == 0:
        options.micro_batch_tokens = options.context
    total_tokens = options.steps * options.batch_tokens
    optimization = OptimizationSettings(
        schedule="extension", total_tokens=total_tokens, **_fields(OptimizationSettings, options)
    )
    extension = Extension(context_tokens=options.context, optimization=optimization, **_fields(Extension, options))
    _check_parent_and_text(extension)
    out = local_path(options.out)
    from sbeval.training.extend import extend  # imports torch

    checkpoint = extend(
        extension,
        out,
        allow_unread=allow_unread,
        context_parallel=options.context_parallel,
        **_run_options(options, "extend", arguments),
    )
    _print_next_command(checkpoint)


def _run_options(options: argparse.Namespace, command: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments that both commands pass to `train` or `extend` in addition to the run's settings.

    One of them is the command line itself, for the record.
    """
    common = {name: getattr(options, name) for name in ("max_seconds", "fsdp", "replace")}
    return common | {"command": shlex.join(["sbeval", command, *arguments])}


def _fields(kind: type[Settings], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of those options whose names are fields of the settings class `kind`."""
    return {name: value for name, value in vars(options).items() if name in kind.model_fields}


def _check_parent_and_text(extension: Extension) -> None:
    """Checks that checkpoint and text exist, before torch is imported."""
    check_name(extension.checkpoint, "a checkpoint to extend", file="config.json")
    if (extension.data / "tokens.npy").is_file():
        load_arrays(extension.data)
    else:
        own_text.check_text(own_text.OwnText(source=str(extension.data)), has_tokenizer=True)


def _print_next_command(checkpoint: Path | None) -> None:
    if checkpoint is not None and is_first_process():  # the other ranks may get here before the checkpoint is written
        print_next_step(evaluation_of_folder(checkpoint))


def _check_text_options(options: argparse.Namespace) -> None:
    """Checks that the options about the training text fit together, before anything slow is imported."""
    text_options = ("tokenizer", "split", "text_field", "dataset_config", "dataset_split", "report")
    if options.text is None:
        given_options = [f"--{name.replace('_', '-')}" for name in text_options if getattr(options, name)]
        if given_options:
            raise UserError(f"{', '.join(given_options)} need --text: name a text, or remove them")
        if options.recipe is None:
            raise UserError("Give a recipe or --text; `sbeval train --help` lists the options")
    elif options.data is not None:
        raise UserError("--text and --data exclude each other: remove one of them")
    if options.split is not None:
        read_value(Split, options.split, name="--split")


def _with_own_text(
    options: argparse.Namespace, mapping: dict[str, Any], changes: Sequence[str]
) -> tuple[Path, dict[str, Any]]:
    """Tokenises the text of `--text`.

    Returns:
        The folder of the token arrays, and the recipe's settings, changed as the text and `changes` require.
    """
    hub_options = {"dataset_config": options.dataset_config, "dataset_split": options.dataset_split}
    text = own_text.OwnText(options.text, options.split, options.text_field, **hub_options)
    own_text.check_text(text, has_tokenizer=options.tokenizer is not None)
    if options.tokenizer is not None:
        check_name(options.tokenizer, "a tokenizer")
    tokenizer = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
    folder = own_text.tokenised_text(text, tokenizer, holding_out=True)
    own_text.print_held_out(folder)
    if options.recipe is None and (name := own_text.name_of_text(options.text)).casefold() not in recipes.RUN_FILES:
        mapping = {**mapping, "name": name}
    mapping = _with_changes(recipes.merged(mapping, own_text.settings_of_text(text, folder)), changes)
    return folder, recipes.merged(mapping, own_text.one_epoch(mapping, folder))


def _with_changes(mapping: dict[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Applies `--set KEY=VALUE` changes to a recipe's settings, in place."""
    for change in changes:
        path, equals, value = change.partition("=")
        if not equals:
            raise UserError(f"Expected --set KEY=VALUE, found {change!r}; write a setting, =, and its value")
        place = mapping
        *parents, last = path.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise UserError(
                    f"--set {path} names no setting: {parent!r} is a value, not a group of settings; correct the key"
                )
        try:
            place[last] = parse_yaml(value)
        except UserError as error:
            raise UserError(f"The value of --set {path}={value} is not valid YAML ({error}); correct it") from None
    return mapping
