"""What follows `sbeval sweep` on the command line, as settings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.sweep.settings import CheckpointSettings, SweepSettings, check_lengths, load_sweep
from sbeval.sweep.suites import SUITES, suite_runs


def sweep_from_command(
    arguments: Sequence[str],
    *,
    suite: str | None,
    output: str | None = None,
    context_lengths: str | None = None,
    limit: float | None = None,
    model_args: str | None = None,
) -> SweepSettings:
    """Returns the settings of a sweep file, or those of a suite over checkpoints.

    Args:
        arguments: the sweep file, or with `suite` the checkpoints.
        suite: name of a suite.
        output: folder of all results.
        context_lengths: lengths in tokens with commas between them.
        limit: documents of a task.
        model_args: arguments of every model, as lm-eval reads them: `key=value,...` or a JSON object.

    Raises:
        UserError: arguments that do not belong together, or a value that cannot be.
    """
    options = {"output": output, "context_lengths": context_lengths, "limit": limit, "model_args": model_args}
    if suite is None:
        return _from_file(arguments, [name for name, value in options.items() if value is not None])
    if not arguments:
        raise UserError(f"Expected checkpoints behind --suite {suite}, found none: name at least one.")
    runs = suite_runs(suite, _lengths(context_lengths))
    return SweepSettings(
        checkpoints=tuple(CheckpointSettings(pretrained=path) for path in arguments),
        runs=runs,
        output=output or f"results/{suite}",
        model_args=_model_args(model_args),
        limit=int(limit) if limit is not None and limit.is_integer() else limit,
    )


def _from_file(arguments: Sequence[str], options: Sequence[str]) -> SweepSettings:
    if len(arguments) != 1 or Path(arguments[0]).suffix not in (".yaml", ".yml"):
        found = " ".join(arguments) or "nothing"
        raise UserError(
            f"Expected one sweep file (SWEEP.yaml), or --suite NAME and checkpoints, found {found}: "
            f"the suites are {', '.join(sorted(SUITES))}."
        )
    if options:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise UserError(f"Expected {names} with --suite only, found {arguments[0]}: write it into that file.")
    return load_sweep(Path(arguments[0]))


def _lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"Expected --context-lengths as whole numbers with commas between them, found {text!r}.")
    return check_lengths([int(part) for part in parts], "--context-lengths")


def _model_args(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    from lm_eval._cli.utils import key_val_to_dict, try_parse_json

    try:
        parsed = try_parse_json(text)
        return parsed if isinstance(parsed, dict) else dict(key_val_to_dict(text))
    except ValueError as error:
        raise UserError(f"Expected --model-args as key=value,... or a JSON object, found {text!r} ({error}).") from None
