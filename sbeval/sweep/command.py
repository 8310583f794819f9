"""Reads the settings of a sweep from a sweep file, or from the command line's suite and checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from sbeval.errors import UserError, brief
from sbeval.foreign_files import read_yaml
from sbeval.settings import Expected, Lengths, as_counts, read_value, unknown_key
from sbeval.sweep.definition import Sweep, SweepCheckpoint, SweepRun
from sbeval.sweep.suites import SUITES, suite_runs

_Entry = TypeVar("_Entry", SweepRun, SweepCheckpoint)
_LengthsOption = Annotated[tuple[int, ...], Expected("positive whole numbers with commas between them", as_counts)]


def sweep_from_command(
    arguments: Sequence[str],
    *,
    suite: str | None,
    follow: str | None = None,
    **suite_options: Any,
) -> Sweep:
    """Returns the sweep that the command line describes: a sweep file, or a suite and checkpoints.

    Args:
        arguments: one sweep file, or checkpoints if there is a suite.
        suite: name of a suite, or None.
        follow: folder of a training whose checkpoints are evaluated as they appear, or None.
        **suite_options: fields of `Sweep` for a suite, and `context_lengths`; None for an option that was not passed.

    Raises:
        UserError: the arguments cannot be combined, or a value is invalid.
    """
    options = {name: value for name, value in suite_options.items() if value is not None}
    if suite is None:
        return _from_file(arguments, list(options), follow)
    if not arguments and follow is None:
        raise UserError(f"--suite {suite} needs checkpoints: name at least one after it.")
    lengths = options.pop("context_lengths", None)
    if lengths is not None:
        lengths = read_value(_LengthsOption, lengths, name="--context-lengths")
    checkpoints = tuple(SweepCheckpoint(pretrained=path) for path in arguments)
    options["output"] = options.get("output") or f"results/{suite}"
    if mappings := [name for name in ("model_args", "metadata") if name in options]:
        from sbeval.harness.options import read_mapping  # imports lm-eval, which takes seconds

        options |= {name: read_mapping(options[name], f"--{name.replace('_', '-')}") for name in mappings}
    return Sweep(checkpoints=checkpoints, follow=follow, runs=suite_runs(suite, lengths), **options)


def load_sweep(path: Path, follow: str | None = None) -> Sweep:
    """Reads a sweep file.

    Its keys are the fields of `Sweep` and two more: `suite` names a set of runs, to which `runs` are added, and
    `context_lengths` sets the context lengths of the suite and of runs without lengths. A checkpoint may be written as
    its path. The argument `follow`, if not None, replaces the value in the file.

    Raises:
        UserError: the file is missing or not YAML, a key is unknown or missing, or a value is invalid.
    """
    values = read_yaml(path, "a sweep file")
    source = path.name
    known = {*Sweep.model_fields, "suite", "context_lengths"}
    if unknown := [key for key in values if key not in known]:
        raise UserError(unknown_key(unknown[0], known, place="the sweep", source=source))
    suite, lengths = values.pop("suite", None), values.pop("context_lengths", None)
    if lengths is not None:
        lengths = read_value(Lengths, lengths, name="context_lengths of the sweep", source=source)
    runs = _listed(SweepRun, values.pop("runs", None), "run", "name", source)
    if suite is not None:
        runs = [*suite_runs(suite, lengths), *runs]
    elif lengths is not None:
        runs = [run if run.context_lengths else run.changed(context_lengths=lengths) for run in runs]
    checkpoints = _listed(SweepCheckpoint, values.pop("checkpoints", None), "checkpoint", "pretrained", source)
    values |= {"checkpoints": tuple(checkpoints), "runs": tuple(runs)}
    if follow is not None:
        values["follow"] = follow
    return Sweep.read(values, place="the sweep", source=source)


def _listed(kind: type[_Entry], value: Any, what: str, title: str, source: str) -> list[_Entry]:
    """Reads a list of runs or checkpoints; errors name an entry by the value of its key `title`, if it has that key."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise UserError(
            f"Expected {what}s of the sweep as a list (lines that begin with `- `), found {brief(value)}: correct it "
            f"in {source}."
        )
    entries = []
    for entry in value:
        name = entry.get(title) if isinstance(entry, dict) else None
        place = f"a {what}" if name is None else f"{what} {name!r}"
        is_path = isinstance(entry, str) and kind is SweepCheckpoint
        entries.append(kind.read({title: entry} if is_path else entry, place=place, source=source))
    return entries


def _from_file(arguments: Sequence[str], options: Sequence[str], follow: str | None) -> Sweep:
    if len(arguments) != 1 or Path(arguments[0]).suffix not in (".yaml", ".yml"):
        raise UserError(
            "Expected one sweep file (SWEEP.yaml), or --suite NAME and checkpoints, found "
            f"{' '.join(arguments) or 'nothing'}: the suites are {', '.join(sorted(SUITES))}."
        )
    if options:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise UserError(f"Use {names} with --suite only: with a sweep file, write the option into {arguments[0]}.")
    return load_sweep(Path(arguments[0]), follow)
