"""The tidy table: one row a measured number, taken from the metrics of every task of every run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.errors import shown
from sbeval.foreign_files import usable_number
from sbeval.reports.read.fields import is_length, shown_name
from sbeval.reports.read.files import Notes
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.results import records
from sbeval.reports.read.runs import UNLIMITED, EvaluationRun, TaskResult, input_limit
from sbeval.results.records import TaskRecord, metric_key, parse_metric_key

MEASUREMENT_COLUMNS = [
    "setting",
    "task",
    "family",
    "corpus",
    "corpus_sha256",
    "protocol",
    "metric",
    "filter",
    "context_length_tokens",
    "text_length_tokens",
    "max_length_tokens",
    "value",
    "ci95_low",
    "ci95_high",
    "stderr",
    "tokens",
    "clusters",
    "samples",
    "few_shot",
    "higher_is_better",
    "bos",
    "separator",
    "targets_per_window",
    "tokenizer_sha256",
    "seed",
    "attention",
    "training_length_tokens",
    "sliding_window",
    "run_date",
    "results_file",
    "limit_samples",
]
_NUMBERS = (
    "value",
    "ci95_low",
    "ci95_high",
    "stderr",
    "tokens",
    "clusters",
    "samples",
    "nll",
    "first",
    "last",
    "limit_samples",
)
_WHOLE_NUMBERS = (
    "context_length_tokens",
    "text_length_tokens",
    "max_length_tokens",
    "few_shot",
    "training_length_tokens",
    "sliding_window",
    "seed",
)
# what names one number of a model
NUMBER_KEYS = [
    "task",
    "corpus_sha256",
    "protocol",
    "metric",
    "filter",
    "context_length_tokens",
    "text_length_tokens",
    "max_length_tokens",
    "few_shot",
]


def tabulate_measurements(models: Sequence[EvaluatedModel], notes: Notes) -> pd.DataFrame:
    """Returns one row a number, columns `MEASUREMENT_COLUMNS`; NaN where missing.

    Of several runs of one model the number from most samples counts (`--limit`), and of these the newest.
    """
    rows = [row for model in models for run, task in model.task_runs() for row in _task_rows(model, run, task, notes)]
    return _first(typed_frame(rows, MEASUREMENT_COLUMNS), ["setting", *NUMBER_KEYS], notes)


def typed_frame(rows: list[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    """Returns the columns of rows as a table, numbers as float64 and whole numbers as Int64."""
    cells = {column: pd.Series([row.get(column) for row in rows], dtype=object) for column in columns}
    frame = pd.DataFrame(cells, columns=columns)
    if "run_date" in frame:
        frame["run_date"] = pd.to_datetime(frame["run_date"], utc=True)
    for column in _NUMBERS:
        if column in frame:
            frame[column] = frame[column].astype("float64")
    for column in _WHOLE_NUMBERS:
        if column in frame:
            frame[column] = frame[column].astype("Int64")
    return frame


def _first(measurements: pd.DataFrame, keys: list[str], notes: Notes) -> pd.DataFrame:
    repeated = measurements.duplicated(keys, keep="first")
    kept = measurements[~repeated]
    dates = {(row["setting"], row["task"]): row["run_date"] for row in records(kept.iloc[::-1])}
    for (model, file, task), rows in measurements[repeated].groupby(["setting", "results_file", "task"], sort=True):
        lengths = rows["context_length_tokens"].dropna().nunique()
        where = f" at {lengths} context lengths" if lengths else ""
        if rows["run_date"].iloc[0] > dates[model, task]:
            notes.add(None, f"{model}: {task}{where} was run on more samples; those in {file} are not shown.")
        else:
            notes.add(None, f"{model}: {task}{where} was run again later; the older numbers in {file} are not shown.")
    return kept.sort_values(["setting", "task", "metric", "context_length_tokens"], kind="stable").reset_index(
        drop=True
    )


def _task_rows(model: EvaluatedModel, run: EvaluationRun, task: TaskResult, notes: Notes) -> list[dict[str, Any]]:
    """Returns one row a number of a task; a number that is not finite becomes a note."""
    record = task.record
    context: dict[str, Any] = {
        "setting": model.label,
        "task": shown_name(task.name),
        "family": record.family if record else None,
        "corpus": shown_name(record.corpus) if record and record.corpus else None,
        "corpus_sha256": record.corpus_sha256 if record else None,
        "protocol": record.protocol if record else None,
        "few_shot": task.few_shot,
        "bos": record.bos if record else None,
        "separator": record.separator if record else None,
        "targets_per_window": record.targets_per_window if record else None,
        "tokenizer_sha256": record.tokenizer_sha256 if record else None,
        "seed": record.seed if record else None,
        "attention": run.record.attention,
        "training_length_tokens": run.record.training_length_tokens,
        "sliding_window": run.record.sliding_window,
        "run_date": run.date,
        "results_file": str(run.path),
        "limit_samples": task.limit_samples,
        "samples": task.samples_used if record is None or record.family != "perplexity" else None,
    }
    limit = input_limit(run, task)
    rows = []
    for key, value in task.metrics.items():
        name, _, filter_name = key.partition(",")
        parsed = _metric_and_length(name, record)
        if parsed is None:
            continue
        metric, length = parsed
        if length is not None and not is_length(length):
            notes.add(run.path, f"{task.name}: {name} left out: {length} is no context length.")
            continue
        number = usable_number(value)
        # lm-eval writes N/A where there is nothing to compute, and its own ruler -1 at a length that was not asked for
        if number is None or (record is None and length is not None and number == -1 and metric == "score"):
            if number is None and not isinstance(value, list) and value not in (None, "N/A", "", " "):
                notes.add(run.path, f"{task.name}: {name} is {shown(value)}; left as missing.")
            continue
        low, high = _interval(task.metrics, metric, length, filter_name)
        rows.append(
            context
            | {
                "metric": metric,
                "filter": filter_name or None,
                "higher_is_better": task.higher_is_better.get(metric),
                "context_length_tokens": length,
                **(limit if length is None else UNLIMITED)._asdict(),
                "value": number,
                "ci95_low": low,
                "ci95_high": high,
                "stderr": usable_number(task.metrics.get(f"{name}_stderr,{filter_name}")),
                "tokens": _beside(task.metrics, "tokens", length, filter_name),
                "clusters": _beside(task.metrics, "clusters", length, filter_name),
            }
        )
    return rows


def _metric_and_length(name: str, record: TaskRecord | None) -> tuple[str, int | None] | None:
    if name in ("alias", "sample_len", "name", " ") or name.endswith("_stderr"):
        return None
    parsed = parse_metric_key(name)
    if parsed is not None:
        return None if parsed[0].endswith("_ci95") or parsed[0] in ("tokens", "clusters") else parsed
    if name.startswith("position_"):
        return None
    if name.isascii() and name.isdigit() and len(name) < 30:  # lm-eval's own ruler names its metrics by length alone
        return "score", int(name)
    return name, None


def _interval(metrics: Mapping[str, Any], metric: str, length: int | None, filter_name: str) -> tuple[float, float]:
    name = f"{metric}_ci95" if length is None else metric_key(f"{metric}_ci95", length)
    return interval_ends(metrics.get(f"{name},{filter_name}", metrics.get(name)))


def interval_ends(value: Any) -> tuple[float, float]:
    """Returns the ends of an interval as results files hold it, NaN where there is none."""
    if isinstance(value, list) and len(value) == 2:
        low, high = usable_number(value[0]), usable_number(value[1])
        if low is not None and high is not None:
            return low, high
    return math.nan, math.nan


def _beside(metrics: Mapping[str, Any], name: str, length: int | None, filter_name: str) -> float:
    if length is None:
        return math.nan
    key = metric_key(name, length)
    number = usable_number(metrics.get(f"{key},{filter_name}", metrics.get(key)))
    return math.nan if number is None else number
