"""The last line of a command: which command to run next."""

import contextlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from sbeval.foreign_files import has_tokenizer_files
from sbeval.processes import ranks

_said_later = False

EVALUATE = "sbeval run --model_args pretrained={} --tasks sb_stdlib_fixed_target --limit 40 --output_path results"
"""What a checkpoint just made can be tried with: a task that needs no data of its own."""


def evaluation_of(
    checkpoint: str,
    *,
    tasks: str | None = None,
    metadata: str | None = None,
    model_args: str | None = None,
    limit: float | None = None,
) -> str:
    """Returns the command line that evaluates a checkpoint, with the given options in place of `EVALUATE`'s.

    `model_args` are pairs such as "dtype=bfloat16,max_length=4096", or a JSON object.
    """
    arguments = f"pretrained={checkpoint}" + (f",{model_args}" if model_args else "")
    if model_args and model_args.lstrip().startswith("{"):
        arguments = json.dumps({"pretrained": checkpoint, **json.loads(model_args)})
    if not tasks:
        return EVALUATE.replace("pretrained={}", shlex.quote(arguments))
    given = [("--model_args", arguments), ("--tasks", tasks), ("--metadata", metadata)]
    given.append(("--limit", None if limit is None else f"{limit:g}"))
    options = [f"{name} {shlex.quote(value)}" for name, value in given if value]
    return f"sbeval run {' '.join(options)} --output_path results"


def evaluation_of_folder(folder: Path) -> str:
    """Returns what evaluates a checkpoint just written; where it has no tokenizer, a user first saves one."""
    command = EVALUATE.format(shlex.quote(str(folder)))
    return command if has_tokenizer_files(folder) else f"save the files of its tokenizer in {folder}, then {command}"


def say_next(step: str) -> None:
    """Prints, as a command's last line, what to do next; the first of several processes does so alone."""
    if not _said_later:
        ranks.say(f"Next: {step}")


@contextlib.contextmanager
def saying_next_later() -> Iterator[None]:
    """Within it `say_next` prints nothing: the command goes on, and prints its last line at its own end."""
    global _said_later
    before = _said_later
    _said_later = True
    try:
        yield
    finally:
        _said_later = before
