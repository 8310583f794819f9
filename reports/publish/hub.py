"""Evaluation result files of the Hugging Face hub, `.eval_results/*.yaml` in a model's repository.

The format is https://huggingface.co/docs/hub/eval-results: a list of entries, each a number of one data set of the hub.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from sbeval.errors import UserError
from sbeval.reports.read.fields import shown_name
from sbeval.reports.read.results import Results, records
from sbeval.reports.read.runs import TaskResult
from sbeval.results.outputs import is_new, set_aside, written_beside

FOLDER = ".eval_results"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# an NLL at a length by other names: these follow from it
_DERIVED = ("token_perplexity", "byte_perplexity", "word_perplexity", "nll_change")
_UNITS = {"nll": "NLL in nats a token, lower is better", "bits_per_byte": "bits a byte, lower is better"}


class HubFiles(NamedTuple):
    """What was written.

    Attributes:
        files: the files, one a model and task.
        without_dataset: tasks that name no data set of the hub, which are left out.
    """

    files: tuple[Path, ...]
    without_dataset: tuple[str, ...]


def write_hub_results(
    results: Results, folder: Path, *, datasets: Mapping[str, str], replace: bool = False
) -> HubFiles:
    """Writes `MODEL/.eval_results/TASK.yaml` below a folder: a model's folder is uploaded to its repository.

    Args:
        results: models and their numbers.
        folder: a folder that does not exist yet, or is empty.
        datasets: names of tasks to ids of data sets, for tasks whose results name none.
        replace: where the folder holds something, move that aside.

    Raises:
        UserError: a name in `datasets` is no task here, an id is none of a data set, the folder holds something, or no
            task has a data set.
    """
    if not replace and not is_new(folder):
        raise UserError(
            f"Expected a new or empty folder for the hub's files, found something in {folder}: name another, or move "
            "it aside with --replace."
        )
    known = {shown_name(task.name): task for model in results.models for _, task in reversed(model.task_runs())}
    for name, dataset in datasets.items():
        if name not in known:
            raise UserError(f"Expected the name of a task, found {name!r}; the tasks are {', '.join(known)}.")
        if not _HUB_ID.fullmatch(dataset):
            raise UserError(f"Expected the id of a data set (owner/name) for {name}, found {dataset!r}: correct it.")
    entries: dict[Path, list[dict[str, Any]]] = defaultdict(list)
    without: set[str] = set()
    for row in records(results.measurements):
        task = str(row["task"])
        found = datasets.get(task) or dataset_of(known[task])
        if row["metric"] in _DERIVED or pd.isna(row["value"]):
            continue
        if found is None:
            without.add(task)
            continue
        entries[Path(_file_name(row["setting"]), FOLDER, f"{_file_name(task)}.yaml")].append(_entry(row, found))
    if not entries:
        raise UserError(
            f"Expected tasks whose text is a data set of the hub, found none ({', '.join(sorted(without))}): name one "
            "with --hub-dataset TASK=OWNER/NAME."
        )
    if replace and not is_new(folder):
        set_aside(folder)
    with written_beside(folder) as part:
        for file, listed in entries.items():
            (part / file).parent.mkdir(parents=True, exist_ok=True)
            (part / file).write_text(yaml.safe_dump(listed, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return HubFiles(tuple(folder / file for file in entries), tuple(sorted(without)))


def dataset_of(task: TaskResult) -> str | None:
    """Returns the id of the data set of the hub whose text a task reads, None where its results name none."""
    named = task.dataset if task.record is None else task.record.corpus_detail
    found = _HUB_ID.match(named or "")
    return found[0] if found else None


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
    """Returns a name as one that a folder or file can have anywhere."""
    return re.sub(r"[^\w.-]+", "-", str(name)).strip("-.") or "model"
