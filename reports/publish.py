"""Publishes results: evaluation result files for the Hugging Face Hub, and curves in experiment trackers.

The hub's format is described at https://huggingface.co/docs/hub/eval-results: files `.eval_results/*.yaml` in the
repository of a model. Each is a list of entries, and an entry is one number on a data set of the hub. In a tracker, a
model is a run, and the context length is the step. Numbers are rows of the tidy table. Training seeds are not averaged,
since every seed is a separate checkpoint.

The trackers wandb and trackio are optional packages, and nothing else in sbeval depends on them. Neither needs an
account: wandb honours `WANDB_MODE=offline`, and trackio keeps runs on this machine.
"""

import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import yaml

from sbeval.errors import UserError
from sbeval.hub_names import local_path
from sbeval.keeping.writing import is_new, set_aside, written_beside
from sbeval.reports.analyse.selection import restrict
from sbeval.reports.build import load_results
from sbeval.reports.read.fields import display_name
from sbeval.reports.read.results import Results, records
from sbeval.reports.read.runs import TaskResult

FOLDER = ".eval_results"
STEP = "context_length_tokens"
Tracker = Literal["wandb", "trackio"]
_OFFLINE = {"wandb": " with WANDB_MODE=offline", "trackio": ""}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# metrics that are computed from NLL at a context length
_DERIVED = ("token_perplexity", "byte_perplexity", "word_perplexity", "nll_change")
_UNITS = {"nll": "NLL in nats per token, lower is better", "bits_per_byte": "bits per byte, lower is better"}


def publish(
    paths: Iterable[Path],
    *,
    hub_results: Path | None = None,
    wandb: str | None = None,
    trackio: str | None = None,
    datasets: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    only: Iterable[str] = (),
    replace: bool = False,
) -> None:
    """Publishes results and prints which files and runs it wrote. Each training seed is published as a separate model.

    Args:
        paths: result files, or folders that are searched for them.
        hub_results: folder for the hub's evaluation result files; None to write none.
        wandb: name of a project of Weights & Biases; None to log nothing there.
        trackio: name of a project of trackio; None to log nothing there.
        datasets: task to id of its data set on the hub, for tasks whose results do not name a data set.
        labels: name of a model or text to the name shown instead.
        only: names or patterns of models and tasks; all if empty.
        replace: whether the folder `hub_results` is moved aside if it is not empty.

    Raises:
        UserError: there is nothing to publish, a package is missing, or a file cannot be written.
    """
    results = restrict(load_results(paths, labels=labels), only)
    if hub_results is not None:
        written = write_hub_results(results, hub_results, datasets=datasets or {}, replace=replace)
        print(f"{len(written.files)} files for the hub are in {hub_results}, one folder for each model")
        if written.without_dataset:
            print(
                f"left out, since their results name no data set of the hub: {', '.join(written.without_dataset)} "
                "(--hub-dataset TASK=OWNER/NAME names one)"
            )
    trackers: dict[Tracker, str | None] = {"wandb": wandb, "trackio": trackio}
    for tracker, project in trackers.items():
        if project is not None:
            print(f"{tracker} has the curves of {', '.join(log_curves(results, tracker, project=project))}")


class HubFiles(NamedTuple):
    """The files written, one for each model and task, and the tasks left out because their hub data set is unknown."""

    files: tuple[Path, ...]
    without_dataset: tuple[str, ...]


def write_hub_results(
    results: Results, folder: Path, *, datasets: Mapping[str, str], replace: bool = False
) -> HubFiles:
    """Writes `MODEL/.eval_results/TASK.yaml` below a folder. Users upload the folder of a model to its hub repository.

    Args:
        results: models and their numbers.
        folder: a folder that does not exist yet, or is empty.
        datasets: task to id of its data set (owner/name), for tasks whose results do not name a data set.
        replace: whether a folder that is not empty is moved aside.

    Raises:
        UserError: a key of `datasets` is not a task of the results, an id is malformed, the folder is not empty, or no
            task has a data set.
    """
    folder = local_path(folder)
    if not replace and not is_new(folder):
        remedy = "name another folder, or pass --replace to move it aside"
        raise UserError(f"The folder for the hub's files, {folder}, is not empty: {remedy}.")
    known = {display_name(task.name): task for model in results.models for _, task in reversed(model.task_runs())}
    for name, dataset in datasets.items():
        if name not in known:
            raise UserError(f"The results hold no task {name!r}; their tasks are {', '.join(known)}.")
        if not _HUB_ID.fullmatch(dataset):
            raise UserError(f"Expected the id of a data set (owner/name) for {name}, found {dataset!r}.")
    entries: dict[Path, list[dict[str, Any]]] = defaultdict(list)
    without: set[str] = set()
    for row in records(results.measurements):
        task = str(row["task"])
        if row["metric"] in _DERIVED or pd.isna(row["value"]):
            continue
        named = datasets.get(task) or dataset_of(known[task])
        if named is None:
            without.add(task)
        else:
            file = Path(_file_name(row["setting"]), FOLDER, f"{_file_name(task)}.yaml")
            entries[file].append(_entry(row, named))
    if not entries:
        raise UserError(
            f"No task names a data set of the hub ({', '.join(sorted(without))}): name one with "
            "--hub-dataset TASK=OWNER/NAME."
        )
    if replace and not is_new(folder):
        set_aside(folder)
    with written_beside(folder) as new:
        for file, listed in entries.items():
            (new / file).parent.mkdir(parents=True, exist_ok=True)
            (new / file).write_text(yaml.safe_dump(listed, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return HubFiles(tuple(folder / file for file in entries), tuple(sorted(without)))


def dataset_of(task: TaskResult) -> str | None:
    """Returns the id (owner/name) of the hub data set that a task reads; None if its results do not name one."""
    named = _HUB_ID.match((task.dataset if task.record is None else task.record.corpus_detail) or "")
    return named[0] if named else None


def _entry(row: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    length = row["context_length_tokens"]
    at = "" if pd.isna(length) else f"@{int(length)}"
    return {
        "dataset": {"id": dataset, "task_id": f"{row['task']}/{row['metric']}{at}"},
        "value": float(row["value"]),
        "date": row["run_date"].isoformat(),
        "notes": "; ".join(_notes(row)),
    }


def _notes(row: Mapping[str, Any]) -> Iterable[str]:
    if not pd.isna(row["context_length_tokens"]):
        yield f"context length {int(row['context_length_tokens']):,} tokens"
    if row["metric"] in _UNITS:
        yield _UNITS[row["metric"]]
    if not pd.isna(row["ci95_low"]):
        yield f"95% interval [{row['ci95_low']:.4f}, {row['ci95_high']:.4f}] over {int(row['clusters'])} documents"
    elif not pd.isna(row["stderr"]):
        yield f"standard error {row['stderr']:.4f}"
    if not pd.isna(row["few_shot"]):
        yield f"{int(row['few_shot'])}-shot"
    if not pd.isna(row["limit_samples"]):
        yield f"{int(row['limit_samples'])} samples (--limit)"
    yield "measured with sbeval and lm-evaluation-harness"


def _file_name(name: object) -> str:
    """Turns a name into one that is valid for files and folders on every operating system."""
    return re.sub(r"[^\w.-]+", "-", str(name)).strip("-.") or "model"


def curves_of(results: Results) -> dict[str, dict[int, dict[str, float]]]:
    """Returns all numbers that have a context length: model to (length in tokens to (name to value)).

    The name of a number is `TASK/METRIC`; the ends of its confidence interval are named `TASK/METRIC_ci95_low` and
    `TASK/METRIC_ci95_high`. Missing values are left out.
    """
    curves: dict[str, dict[int, dict[str, float]]] = {}
    for row in records(results.measurements.dropna(subset=[STEP, "value"])):
        numbers = curves.setdefault(row["setting"], {}).setdefault(int(row[STEP]), {})
        name = f"{row['task']}/{row['metric']}"
        numbers[name] = float(row["value"])
        for end in ("ci95_low", "ci95_high"):
            if not pd.isna(row[end]):
                numbers[f"{name}_{end}"] = float(row[end])
    return {model: dict(sorted(lengths.items())) for model, lengths in curves.items()}


def log_curves(results: Results, tracker: Tracker, *, project: str) -> list[str]:
    """Logs the curves of each model as one run in a project of a tracker; the step is the context length.

    Returns:
        The labels of the models logged.

    Raises:
        UserError: the package is not installed, no number has a context length, or the tracker fails.
    """
    curves = curves_of(results)
    if not curves:
        raise UserError(f"The results hold no numbers at context lengths for --{tracker}: evaluate sb_ tasks.")
    try:
        package = importlib.import_module(tracker)
    except ImportError as error:
        raise UserError(
            f"--{tracker} needs the package {tracker}, which is not installed: pip install 'sbeval[{tracker}]'."
        ) from error
    for model, lengths in curves.items():
        facts = {name: fact for name, fact in results.model(model).record.to_json().items() if fact is not None}
        try:
            run = package.init(project=project, name=model, config=facts)
            # `log` is a method of the run that wandb returns, but a function of the package trackio
            log_to = run if tracker == "wandb" else package
            try:
                if tracker == "wandb":
                    run.define_metric(STEP)
                    run.define_metric("*", step_metric=STEP)
                for length, numbers in lengths.items():
                    log_to.log({STEP: length, **numbers}, step=length)
            finally:
                log_to.finish()
        except Exception as error:  # trackers raise their own error classes and those of their HTTP libraries
            remedy = f"correct the project, log in, or log on this machine{_OFFLINE[tracker]}"
            raise UserError(
                f"--{tracker} could not log {model} ({type(error).__name__}: {error}): {remedy}."
            ) from error
    return list(curves)
