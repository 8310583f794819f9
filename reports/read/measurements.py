"""Takes one task's metrics apart into rows of the tidy table."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sbeval.reports.read.fields import is_length, shown_name, usable_number
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.notes import Notes
from sbeval.reports.read.runs import UNLIMITED, EvaluationRun, TaskResult, input_limit
from sbeval.results.records import TaskRecord, metric_key, parse_metric_key


def task_rows(
    model: EvaluatedModel, run: EvaluationRun, task: TaskResult, notes: Notes
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns one row a number of a task, and one a position bin; a number that is not finite becomes a note."""
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
    rows, positions = [], []
    for key, value in task.metrics.items():
        name, _, filter_name = key.partition(",")
        if name == "position_nll" and isinstance(value, list):
            one_pass = context | {"context_length_tokens": record.lengths[0] if record and record.lengths else math.nan}
            positions += _position_rows(one_pass, value, task.metrics, filter_name)
            continue
        parsed = _metric_and_length(name, record)
        if parsed is None:
            continue
        metric, length = parsed
        if length is not None and not is_length(length):
            notes.add(run.path, f"{task.name}: {name} left out: {length} is no context length.")
            continue
        number = usable_number(value)
        if number is None or (length is not None and number == -1 and metric == "score"):
            if isinstance(value, int | float) and not isinstance(value, bool) and usable_number(value) is None:
                notes.add(run.path, f"{task.name}: {name} is {value}; left as missing.")
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
    return rows, positions


def _metric_and_length(name: str, record: TaskRecord | None) -> tuple[str, int | None] | None:
    if name in ("alias", "sample_len", "name", " ") or name.endswith("_stderr"):
        return None
    parsed = parse_metric_key(name)
    if parsed is not None:
        return None if parsed[0].endswith("_ci95") or parsed[0] in ("tokens", "clusters") else parsed
    if name.startswith("position_"):
        return None
    if name.isdigit():  # lm-eval's own ruler names its metrics by length alone
        return "score", int(name)
    return name, None


def _position_rows(
    context: Mapping[str, Any], bins: Sequence[Any], metrics: Mapping[str, Any], filter_name: str
) -> list[dict[str, Any]]:
    intervals = _list_beside(metrics, "position_nll_ci95", filter_name, len(bins))
    clusters = _list_beside(metrics, "position_clusters", filter_name, len(bins))
    rows = []
    for item, ends, count in zip(bins, intervals, clusters, strict=True):
        if (
            isinstance(item, list)
            and len(item) == 4
            and all(usable_number(part) is not None for part in item)
            and item[3] > 0
        ):
            low, high = _ends(ends)
            number = usable_number(count)
            rows.append(
                {
                    **context,
                    "first": item[0],
                    "last": item[1],
                    "nll": item[2],
                    "ci95_low": low,
                    "ci95_high": high,
                    "tokens": item[3],
                    "clusters": math.nan if number is None else number,
                }
            )
    return rows


def _list_beside(metrics: Mapping[str, Any], name: str, filter_name: str, length: int) -> Sequence[Any]:
    value = metrics.get(f"{name},{filter_name}", metrics.get(name))
    return value if isinstance(value, list) and len(value) == length else [None] * length


def _interval(metrics: Mapping[str, Any], metric: str, length: int | None, filter_name: str) -> tuple[float, float]:
    name = f"{metric}_ci95" if length is None else metric_key(f"{metric}_ci95", length)
    return _ends(metrics.get(f"{name},{filter_name}", metrics.get(name)))


def _ends(value: Any) -> tuple[float, float]:
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
