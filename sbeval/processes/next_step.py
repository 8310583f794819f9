"""The last line of a command: which command to run next."""

import contextlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from sbeval.foreign_files import has_tokenizer_files
from sbeval.processes import ranks

_is_deferred = False

EVALUATE = "sbeval run --model_args pretrained={} --tasks sb_stdlib_fixed_target --limit 40 --output_path results"
"""Command line that evaluates a new checkpoint, with a task that needs no data."""


def evaluation_of(
    checkpoint: str,
    *,
    tasks: str | None = None,
    metadata: str | None = None,
    model_args: str | None = None,
    limit: float | None = None,
) -> str:
    """Returns the command line that evaluates a checkpoint, with these options in place of those of `EVALUATE`.

    `model_args` are pairs such as "dtype=bfloat16,max_length=4096", or a JSON object.
    """
    arguments = f"pretrained={checkpoint}" + (f",{model_args}" if model_args else "")
    if model_args and model_args.lstrip().startswith("{"):
        arguments = json.dumps({"pretrained": checkpoint, **json.loads(model_args)})
    if not tasks:
        return EVALUATE.replace("pretrained={}", shlex.quote(arguments))
    values = [("--model_args", arguments), ("--tasks", tasks), ("--metadata", metadata)]
    values.append(("--limit", None if limit is None else f"{limit:g}"))
    options = [f"{name} {shlex.quote(value)}" for name, value in values if value]
    return f"sbeval run {' '.join(options)} --output_path results"


def evaluation_of_folder(folder: Path) -> str:
    """Returns the next step after writing a checkpoint: to evaluate it, after saving a tokenizer if it has none."""
    command = EVALUATE.format(shlex.quote(str(folder)))
    return command if has_tokenizer_files(folder) else f"save the files of its tokenizer in {folder}, then {command}"


def print_next_step(step: str) -> None:
    """Prints the next step as a command's last line; only rank 0 prints."""
    if not _is_deferred:
        ranks.print_on_rank_0(f"Next: {step}")


@contextlib.contextmanager
def deferring_next_step() -> Iterator[None]:
    """Inside this context `print_next_step` prints nothing, for a command that runs another one first."""
    global _is_deferred
    previous_value = _is_deferred
    _is_deferred = True
    try:
        yield
    finally:
        _is_deferred = previous_value
