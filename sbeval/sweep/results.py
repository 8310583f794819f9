"""Whether a run's folder holds its results: of the same settings, whole, and with their samples."""

import json
from pathlib import Path
from typing import Any

import yaml

from sbeval.sweep.plan import PlannedRun


def other_settings(run: PlannedRun) -> str | None:
    """Returns in what an earlier run of the same folder differs, None where nothing does or none is recorded."""
    try:
        recorded = yaml.safe_load(run.config_file.read_text(encoding="utf-8"))
        weights = json.loads(run.weights_file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(recorded, dict):
        return None
    wanted = json.loads(json.dumps(run.config))
    differing = [
        f"{key} was {_shown(recorded.get(key))} and is {_shown(wanted.get(key))}"
        for key in sorted(recorded.keys() | wanted.keys())
        if recorded.get(key) != wanted.get(key)
    ]
    if weights != run.weights:
        differing.append("the checkpoint's weights have changed")
    return "; ".join(differing) or None


def what_is_missing(run: PlannedRun) -> str | None:
    """Returns what a folder lacks to hold the whole results of its run, None where it lacks nothing.

    Complete means: the settings are recorded, one results file parses, and each of its tasks has a samples file with
    every document lm-eval says it scored.
    """
    if not run.config_file.is_file() or not run.weights_file.is_file():
        return "nothing was run there"
    files = results_files(run.folder)
    if len(files) != 1:
        return "no results file was written" if not files else f"{len(files)} results files instead of one"
    try:
        results = json.loads(files[0].read_text(encoding="utf-8"))
        scored: dict[str, Any] = results["n-samples"]
        tasks = list(results["configs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"the results file {files[0].name} is not whole ({type(error).__name__})"
    if not tasks:
        return f"the results file {files[0].name} holds no task"
    date = files[0].stem.removeprefix("results_")
    for task in tasks:
        documents = scored.get(task, {}).get("effective")
        found = _samples(files[0].with_name(f"samples_{task}_{date}.jsonl"))
        if found is None:
            return f"the samples file of {task} is missing or cut off"
        if isinstance(documents, int) and found < documents:
            return f"the samples file of {task} holds {found} of {documents} documents"
    return None


def results_files(folder: Path) -> list[Path]:
    """Returns lm-eval's results files of a run."""
    return sorted(folder.rglob("results_*.json"))


def remove_results(folder: Path) -> None:
    """Removes lm-eval's results and samples files of a run; everything else stays."""
    for pattern in ("results_*.json", "samples_*.jsonl"):
        for file in folder.rglob(pattern):
            file.unlink()


def _samples(path: Path) -> int | None:
    """Counts a samples file's documents; None where it is missing or its last line was cut off."""
    documents, line = set(), b"\n"
    try:
        with path.open("rb") as lines:
            for line in lines:
                # several filters give a document several lines
                documents.add(json.loads(line)["doc_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return len(documents) if line.endswith(b"\n") else None


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
