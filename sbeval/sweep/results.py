"""Checks whether a run's folder holds complete results with samples, for the run's current settings and inputs."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sbeval.errors import UserError
from sbeval.fingerprint.evaluation import data_revisions, run_inputs
from sbeval.fingerprint.parts import changes
from sbeval.foreign_files import MOST_RESULTS_BYTES, read_json_object, read_yaml
from sbeval.keeping.writing import LOCK, is_unfinished
from sbeval.results.saving import date_of, what_is_cut_off
from sbeval.sweep.definition import PlannedRun

# earlier versions wrote weights.json instead of inputs.json
_OWN_FILES = ("run.yaml", "inputs.json", "weights.json", "log.txt", LOCK)
_MOST_NAMED = 3


def inputs_record(run: PlannedRun) -> str:
    """Returns the text of a run's `inputs_file`: its settings, the fingerprint of its inputs, and data set revisions.

    Raises:
        UserError: an input cannot be read.
    """
    settings, parts = run_inputs(run.config)
    return json.dumps({"settings": settings, "parts": parts | data_revisions(_tasks(run))}, indent=1, sort_keys=True)


def other_settings(run: PlannedRun, now: str | None = None) -> str | None:
    """Returns how the settings and inputs recorded in the run's folder differ from those of the run.

    Returns None if they do not differ, or if none are recorded. `now` is the result of `inputs_record(run)`; if it is
    None, this function calls `inputs_record`.

    Raises:
        UserError: an input of the run cannot be read.
    """
    if (recorded := _inputs(run.inputs_file)) is None:
        return None
    current = json.loads(now or inputs_record(run))
    old, new = recorded["settings"], current["settings"]
    differences = [
        f"{key} was {_shown(old.get(key))} and is {_shown(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    return "; ".join(filter(None, [*differences, changes(recorded["parts"], current["parts"])])) or None


def what_is_missing(run: PlannedRun) -> str | None:
    """Returns the reason why a run's results are not complete, None if they are complete.

    Results are complete if settings and inputs are recorded, exactly one results file exists and parses, and each of
    its tasks has a samples file with every document that lm-eval scored. Whether settings and inputs are still the same
    is checked by `other_settings`.
    """
    if not run.config_file.is_file() or _inputs(run.inputs_file) is None:
        return "nothing was run there"
    files = results_files(run.folder)
    if len(files) != 1:
        return "no results file was written" if not files else f"{len(files)} results files instead of one"
    return what_is_cut_off(files[0])


def results_files(folder: Path) -> list[Path]:
    """Returns the paths of lm-eval's results files in a run's folder."""
    return [file for file in _files(folder) if file.match("results_*.json")]


def in_the_way(run: PlannedRun) -> str | None:
    """Says which files in a run's folder must not be moved aside without --replace; None if there are none.

    The files of a failed or interrupted attempt at this run may be moved: their record has the same settings and
    inputs, and there is at most one results file, with samples of the same date. The record and the log of an earlier
    run without results may be moved too. Any other file is a file of the user or a result of other settings.
    """
    if not run.folder.exists():
        return None
    if not run.folder.is_dir():
        return f"{run.folder} is not a folder"
    files = [file for file in _files(run.folder) if file.name != LOCK and not is_unfinished(file.name)]
    record = [run.folder / name for name in _OWN_FILES]
    recorded = _record(run.config_file)
    inputs = _inputs(run.inputs_file)
    measured = [file for file in files if file.match("results_*.json") or file.match("samples_*.jsonl")]
    foreign = [file for file in files if file not in record and file not in measured]
    contents = None
    if files and recorded is None:
        contents = f"{_shown_files(run.folder, files)} without a sweep's record (run.yaml)"
    elif foreign:
        contents = f"{_shown_files(run.folder, foreign)}, which no sweep wrote"
    elif files and not measured:
        # an attempt that was killed between writing run.yaml and inputs.json leaves the settings of this run
        if inputs is None and recorded != json.loads(json.dumps(run.config)):
            contents = f"{_shown_files(run.folder, files)} without a sweep's record (inputs.json)"
    elif measured and inputs is None:
        contents = f"{_shown_files(run.folder, measured)} without a record of their inputs (inputs.json)"
    elif measured and (differences := other_settings(run)) is not None:
        contents = f"results of other settings ({differences})"
    elif len(results_files(run.folder)) > 1 or len({date_of(file) or file.stem for file in measured}) > 1:
        contents = f"results of several runs ({_shown_files(run.folder, measured)})"
    return contents and f"its folder holds {contents}"


def holds_results(folder: Path) -> bool:
    """Whether a folder holds files other than a sweep's records, log, lock and temporary files."""
    return folder.is_dir() and any(
        file.name not in _OWN_FILES and not is_unfinished(file.name) for file in _files(folder)
    )


def _files(folder: Path) -> list[Path]:
    """Returns all files and links below a folder, without temporary folders."""
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_unfinished(name)]
        links = [name for name in folders if Path(parent, name).is_symlink()]
        files += [Path(parent, name) for name in (*names, *links)]
    return sorted(files)


def _record(file: Path) -> dict[str, Any] | None:
    """Reads a `PlannedRun.config_file`; returns None if it is missing or not a configuration that a sweep wrote."""
    try:
        recorded = read_yaml(file, "the record of a run")
    except UserError:
        return None
    return recorded if {"model", "model_args", "tasks", "output_path", "log_samples"} <= recorded.keys() else None


def _inputs(file: Path) -> dict[str, dict[str, Any]] | None:
    """Reads a `PlannedRun.inputs_file`; returns None if it is missing or a sweep did not write it."""
    try:
        record = read_json_object(file, "the record of a run")
        json.dumps(record, ensure_ascii=False).encode()  # its values are printed, which lone surrogates would break
    except (UserError, UnicodeEncodeError, RecursionError):
        return None
    has_sections = all(isinstance(record.get(key), dict) for key in ("settings", "parts"))
    return record if has_sections and all(isinstance(value, str) for value in record["parts"].values()) else None


def _tasks(run: PlannedRun) -> dict[str, Any]:
    """Returns the section `configs` of a run's results file, empty if there is none."""
    try:
        (file,) = results_files(run.folder)
        configs = read_json_object(file, "results of lm-eval", most=MOST_RESULTS_BYTES).get("configs")
    except ValueError:  # no results file, several, or an unreadable one
        return {}
    return configs if isinstance(configs, dict) else {}


def _shown_files(folder: Path, files: Sequence[Path]) -> str:
    names = [str(file.relative_to(folder)) for file in files[:_MOST_NAMED]]
    more = len(files) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
