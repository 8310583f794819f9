"""What follows `sbeval sweep` on the command line: a sweep file, or a suite over checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from sbeval.errors import UserError, shown
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
    **of_suite: Any,
) -> Sweep:
    """Returns the sweep of a file, or that of a suite over checkpoints with the options `of_suite`, None if not given.

    Raises:
        UserError: arguments that do not belong together, or a value that cannot be.
    """
    given = {name: value for name, value in of_suite.items() if value is not None}
    if suite is None:
        return _from_file(arguments, list(given), follow)
    if not arguments and follow is None:
        raise UserError.expected(f"checkpoints behind --suite {suite}", found="none", remedy="name at least one")
    lengths = given.pop("context_lengths", None)
    if lengths is not None:
        lengths = read_value(_LengthsOption, lengths, name="--context-lengths")
    checkpoints = tuple(SweepCheckpoint(pretrained=path) for path in arguments)
    given["output"] = given.get("output") or f"results/{suite}"
    if mappings := [name for name in ("model_args", "metadata") if name in given]:
        from sbeval.harness.options import read_mapping  # it is lm-eval, which takes seconds

        given |= {name: read_mapping(given[name], f"--{name.replace('_', '-')}") for name in mappings}
    return Sweep(checkpoints=checkpoints, follow=follow, runs=suite_runs(suite, lengths), **given)


def load_sweep(path: Path, follow: str | None = None) -> Sweep:
    """Reads a sweep file.

    Its keys are the fields of `Sweep`; `suite` names a set of runs (`context_lengths` beside it chooses their lengths),
    `runs` lists further ones, and a checkpoint may be written as its path alone. `follow` is a training's folder in
    place of the file's own.

    Raises:
        UserError: no such file, no YAML, an unknown or missing key, or a value that cannot be.
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


def _listed(kind: type[_Entry], listed: Any, what: str, title: str, source: str) -> list[_Entry]:
    """Reads a list of runs or checkpoints; messages name an entry by its title, if it has one."""
    if listed is None:
        return []
    if not isinstance(listed, list):
        raise UserError(
            f"Expected {what}s of the sweep as a list (lines that begin with `- `), found {shown(listed)}: correct it "
            f"in {source}."
        )
    entries = []
    for entry in listed:
        name = entry.get(title) if isinstance(entry, dict) else None
        place = f"a {what}" if name is None else f"{what} {name!r}"
        of_path = isinstance(entry, str) and kind is SweepCheckpoint
        entries.append(kind.read({title: entry} if of_path else entry, place=place, source=source))
    return entries


def _from_file(arguments: Sequence[str], options: Sequence[str], follow: str | None) -> Sweep:
    if len(arguments) != 1 or Path(arguments[0]).suffix not in (".yaml", ".yml"):
        raise UserError(
            "Expected one sweep file (SWEEP.yaml), or --suite NAME and checkpoints, found "
            f"{' '.join(arguments) or 'nothing'}: the suites are {', '.join(sorted(SUITES))}."
        )
    if options:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise UserError(f"Expected {names} with --suite only, found {arguments[0]}: write it into that file.")
    return load_sweep(Path(arguments[0]), follow)
