"""Whether a run's folder holds its results: of the same settings, whole, and with their samples."""

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

# weights.json is what an earlier version kept in place of inputs.json
_OWN_FILES = ("run.yaml", "inputs.json", "weights.json", "log.txt", LOCK)
_MOST_NAMED = 3


def inputs_record(run: PlannedRun) -> str:
    """Returns what is written into a run's `inputs_file`: what it depends on now, and data sets it has read.

    Raises:
        UserError: an input cannot be read.
    """
    settings, parts = run_inputs(run.config)
    return json.dumps({"settings": settings, "parts": parts | data_revisions(_tasks(run))}, indent=1, sort_keys=True)


def other_settings(run: PlannedRun, now: str | None = None) -> str | None:
    """Returns how an earlier run of the same folder differs, None where it does not or none is recorded.

    What the run depends on is `now`, what `inputs_record` has returned; by default it is asked.

    Raises:
        UserError: an input of the run cannot be read.
    """
    if (recorded := _inputs(run.inputs_file)) is None:
        return None
    current = json.loads(now or inputs_record(run))
    was, wanted = recorded["settings"], current["settings"]
    differing = [
        f"{key} was {_shown(was.get(key))} and is {_shown(wanted.get(key))}"
        for key in sorted(was.keys() | wanted.keys())
        if was.get(key) != wanted.get(key)
    ]
    return "; ".join(filter(None, [*differing, changes(recorded["parts"], current["parts"])])) or None


def what_is_missing(run: PlannedRun) -> str | None:
    """Returns what a folder lacks to hold the whole results of its run, None where it lacks nothing.

    Complete means: settings and inputs are recorded, one results file parses, and each of its tasks has a samples file
    with every document lm-eval says it scored. That both are still the same is for `other_settings` to say.
    """
    if not run.config_file.is_file() or _inputs(run.inputs_file) is None:
        return "nothing was run there"
    files = results_files(run.folder)
    if len(files) != 1:
        return "no results file was written" if not files else f"{len(files)} results files instead of one"
    return what_is_cut_off(files[0])


def results_files(folder: Path) -> list[Path]:
    """Returns lm-eval's results files of a run."""
    return [file for file in _files(folder) if file.match("results_*.json")]


def in_the_way(run: PlannedRun) -> str | None:
    """Returns what lies in a run's folder that the run may not move, None where nothing does.

    A run that was interrupted or failed is known by its record of the same settings and inputs: it left at most one
    results file and samples of that file's date. What it left may be moved aside, and so may an earlier run's record
    and log without results. All else was put there by somebody, or is the result of other settings.
    """
    if not run.folder.exists():
        return None
    if not run.folder.is_dir():
        return f"{run.folder} is no folder"
    files = [file for file in _files(run.folder) if file.name != LOCK and not is_unfinished(file.name)]
    record = [run.folder / name for name in _OWN_FILES]
    recorded = _record(run.config_file)
    inputs = _inputs(run.inputs_file)
    measured = [file for file in files if file.match("results_*.json") or file.match("samples_*.jsonl")]
    others = [file for file in files if file not in record and file not in measured]
    held = None
    if files and recorded is None:
        held = f"{_shown_files(run.folder, files)}, and no record (run.yaml) that a sweep put that there"
    elif others:
        held = f"{_shown_files(run.folder, others)}, which no sweep put there"
    elif files and not measured:
        # a kill between the two files of a record leaves this run's own settings
        if inputs is None and recorded != json.loads(json.dumps(run.config)):
            held = f"{_shown_files(run.folder, files)}, and no record (inputs.json) that a sweep put that there"
    elif measured and inputs is None:
        held = f"{_shown_files(run.folder, measured)}, and no record (inputs.json) of what they were measured on"
    elif measured and (other := other_settings(run)) is not None:
        held = f"results of other settings ({other})"
    elif len(results_files(run.folder)) > 1 or len({date_of(file) or file.stem for file in measured}) > 1:
        held = f"results of several runs ({_shown_files(run.folder, measured)})"
    return held and f"its folder holds {held}"


def holds_results(folder: Path) -> bool:
    """Whether a folder holds anything that lm-eval measured, or anything else that is no record or log of a sweep."""
    return folder.is_dir() and any(
        file.name not in _OWN_FILES and not is_unfinished(file.name) for file in _files(folder)
    )


def _files(folder: Path) -> list[Path]:
    """Returns all files but those in folders that are not finished."""
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_unfinished(name)]
        links = [name for name in folders if Path(parent, name).is_symlink()]
        files += [Path(parent, name) for name in (*names, *links)]
    return sorted(files)


def _record(file: Path) -> dict[str, Any] | None:
    """Reads a `config_file`; None where there is none that lm-eval could have run with."""
    try:
        recorded = read_yaml(file, "the record of a run")
    except UserError:
        return None
    return recorded if {"model", "model_args", "tasks", "output_path", "log_samples"} <= recorded.keys() else None


def _inputs(file: Path) -> dict[str, dict[str, Any]] | None:
    """Reads an `inputs_file`; None where there is none that a sweep wrote."""
    try:
        record = read_json_object(file, "the record of a run")
        json.dumps(record, ensure_ascii=False).encode()  # what is printed of it
    except (UserError, UnicodeEncodeError, RecursionError):
        return None
    whole = all(isinstance(record.get(key), dict) for key in ("settings", "parts"))
    return record if whole and all(isinstance(value, str) for value in record["parts"].values()) else None


def _tasks(run: PlannedRun) -> dict[str, Any]:
    """Returns `configs` of a run's results file, nothing where there is none."""
    try:
        (file,) = results_files(run.folder)
        configs = read_json_object(file, "results of lm-eval", most=MOST_RESULTS_BYTES).get("configs")
    except ValueError:  # none, several, or one that cannot be read
        return {}
    return configs if isinstance(configs, dict) else {}


def _shown_files(folder: Path, files: Sequence[Path]) -> str:
    names = [str(file.relative_to(folder)) for file in files[:_MOST_NAMED]]
    more = len(files) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
