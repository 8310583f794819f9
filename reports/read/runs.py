"""Reads one lm-eval result file into typed records, and keeps fields that it does not know.

The metric names of lm-eval's own tasks contain no context length. If such a task was run at several values of
`max_length`, or on texts of several lengths (BABILong takes `--metadata '{"max_seq_lengths": "16k"}'`), each length
becomes a row in the report.
"""

import dataclasses
import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sbeval.errors import UserError, visible
from sbeval.foreign_files import MOST_RESULTS_BYTES, fits, parse_visible_json, read_bytes, usable_number
from sbeval.reports.read.fields import RecordT, context_metric, read_record, telling_name
from sbeval.reports.read.files import Notes, samples_file
from sbeval.results.records import LABEL, ModelRecord, TaskRecord

Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TaskResult:
    """One task of one run.

    Attributes:
        record: sbeval's record of the task; None for a task that is not sbeval's.
        metrics: metric key, with lm-eval's `,filter` suffix, to its value in the file.
        samples: path of the samples file; None if samples were not logged.
        few_shot: number of examples in the prompt; None if it is unknown.
        version: the task's version; None if it is unknown.
        higher_is_better: metric name to whether a higher value is better, for metrics for which the file says so.
        metadata: the task's `metadata` in lm-eval's configuration.
        samples_used: number of samples that the task's numbers are computed from; None if the file does not say.
        limit_samples: number of samples after `--limit`; None if all samples were used.
        dataset: the task's `dataset_path` in lm-eval's configuration; None if it has none.
        means: the part of `metrics` that are means over samples.
    """

    name: str
    record: TaskRecord | None
    metrics: Mapping[str, Any]
    samples: Path | None = None
    few_shot: int | None = None
    version: str | None = None
    higher_is_better: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    samples_used: float | None = None
    limit_samples: float | None = None
    dataset: str | None = None
    means: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRun:
    """The content of one result file of lm-eval: one run.

    Attributes:
        date: when the run started, in UTC.
        record: the model's record.
        label: label that the user gave the model in this run; None if there is none.
        model_source: lm-eval's model name, such as "sb" or "hf".
        model_args: model arguments as the user wrote them.
        described: False if the file has no usable model record, so that `record` was filled from lm-eval's fields.
        limit: lm-eval's `--limit`; None if every document was used.
        raw: other top-level fields of the file, including unknown ones.
    """

    path: Path
    date: datetime.datetime
    record: ModelRecord
    label: str | None
    model_source: str
    model_args: str
    described: bool
    tasks: tuple[TaskResult, ...]
    limit: float | None
    raw: Mapping[str, Any]


def read_run(path: Path, notes: Notes) -> EvaluationRun | None:
    """Reads a result file. For a truncated or empty file, or one that is not lm-eval's, adds a note and returns None.

    NaN, Infinity and fields of a newer lm-eval are accepted.
    """
    try:
        raw = read_bytes(path, MOST_RESULTS_BYTES)
    except UserError as error:
        notes.add(path, f"left out: the file cannot be read ({error}).")
        return None
    try:
        content = parse_visible_json(raw)
    except UserError as error:
        reason = f"is not complete JSON, perhaps cut off while written ({error})" if raw else "is empty"
        notes.add(path, f"left out: the file {reason}.")
        return None
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        notes.add(path, "left out: it is JSON, but not a result file of lm-eval (no `results`).")
        return None
    config = mapping(content.get("config"))
    model, described = _model_record(config, content, path, notes)
    tasks = tuple(
        _task_result(name, metrics, content, path, notes)
        for name, metrics in content["results"].items()
        if isinstance(metrics, dict) and any(key not in ("alias", " ", "sample_len", "name") for key in metrics)
    )
    if not tasks:
        notes.add(path, "left out: the run holds no metric.")
        return None
    label = next((text for task in tasks if isinstance(text := task.metadata.get(LABEL), str) and text), None)
    return EvaluationRun(
        path=path,
        date=_date(content, path),
        record=model if label is None else dataclasses.replace(model, name=label),
        label=label,
        model_source=str(content.get("model_source") or config.get("model") or "unknown"),
        model_args=_arguments_text(config.get("model_args")),
        described=described,
        tasks=tasks,
        limit=usable_number(config.get("limit")),
        raw={key: value for key, value in content.items() if key not in ("results", "configs", "groups", "samples")},
    )


def _model_record(config: Fields, content: Fields, path: Path, notes: Notes) -> tuple[ModelRecord, bool]:
    record = _record(ModelRecord, config.get("sbeval"), "its model record (`config.sbeval`)", path, notes)
    if record is not None:
        pretrained = argument(_arguments_text(config.get("model_args")), "pretrained") or ""
        return dataclasses.replace(record, name=telling_name(record.name, pretrained)), True
    name = str(content.get("model_name") or config.get("model") or visible(path.parent.name))
    dtype = str(config["model_dtype"]).removeprefix("torch.") if config.get("model_dtype") else None
    parameters = config.get("model_num_parameters")
    return (
        ModelRecord(
            name=name.rstrip("/").rpartition("/")[2] or name,
            format=str(content.get("model_source") or "unknown"),
            dtype=dtype,
            parameters=parameters if isinstance(parameters, int) and fits(parameters, int) and parameters > 0 else None,
        ),
        False,
    )


def _record(kind: type[RecordT], written: object, name: str, path: Path, notes: Notes) -> RecordT | None:
    """Builds a record from the fields that have the right type, and adds a note on the others.

    Returns None if a required field is missing or has the wrong type.
    """
    if not isinstance(written, dict):
        return None
    record, fields = read_record(kind, written)
    if record is None:
        notes.add(path, f"{name} was not used: {', '.join(fields)} missing or of the wrong type.")
    elif fields:
        notes.add(path, f"{name} holds no usable value of {', '.join(fields)}: left as missing.")
    return record


def argument(model_args: str, name: str) -> str | None:
    """Returns the value of one of lm-eval's comma-separated model arguments; None if that argument was not given."""
    for part in model_args.split(","):
        key, equals, value = part.partition("=")
        if equals and key.strip() == name:
            return value.strip()
    return None


def _task_result(name: str, metrics: Fields, content: Fields, path: Path, notes: Notes) -> TaskResult:
    config = mapping(mapping(content.get("configs")).get(name))
    metadata = mapping(config.get("metadata"))
    few_shot = mapping(content.get("n-shot")).get(name)
    version = mapping(content.get("versions")).get(name)
    better = mapping(mapping(content.get("higher_is_better")).get(name))
    used = usable_number(mapping(mapping(content.get("n-samples")).get(name)).get("effective"))
    limit = usable_number(mapping(content.get("config")).get("limit"))
    record = _record(TaskRecord, metadata.get("sbeval"), f"the record of task {name}", path, notes)
    return TaskResult(
        name=name,
        record=record,
        metrics=metrics,
        samples=samples_file(path, name, notes),
        few_shot=few_shot if fits(few_shot, int) else None,
        version=None if version is None else str(version),
        higher_is_better={key: value for key, value in better.items() if isinstance(value, bool)},
        metadata=metadata,
        samples_used=used,
        limit_samples=None if limit is None else used or limit,
        dataset=path_of if isinstance(path_of := config.get("dataset_path"), str) else None,
        means={key: value for key, value in metrics.items() if _is_mean(key.partition(",")[0], record, config)},
    )


def _is_mean(metric: str, record: TaskRecord | None, config: Mapping[str, Any]) -> bool:
    if record is not None:
        return record.family not in ("perplexity", "span") and context_metric(metric) is not None
    listed = config.get("metric_list")
    entries = map(mapping, listed if isinstance(listed, list) else [])
    usual = "mean" if metric in ("acc", "acc_norm", "exact_match") else None
    return next((entry.get("aggregation", usual) for entry in entries if entry.get("metric") == metric), None) == "mean"


def mapping(value: Any) -> Mapping[str, Any]:
    """Returns the value, read from a JSON file, if it is a dictionary; else an empty dictionary."""
    return value if isinstance(value, dict) else {}


def _arguments_text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return "" if value is None else str(value)


def _date(content: Mapping[str, Any], path: Path) -> datetime.datetime:
    seconds = usable_number(content.get("date"))
    if seconds is None or not 0 <= seconds < 2**33:
        seconds = path.stat().st_mtime
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC)


_TEXT = re.compile(r"(?P<count>[0-9]{1,12})\s*(?P<unit>[kKmM]?)")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


class InputLimit(NamedTuple):
    """The bounds on the input length of a task in one run.

    Attributes:
        text_length_tokens: length of the texts, from the task's `max_seq_lengths`; None if the task has no such field.
        max_length_tokens: longest input that the run allowed; None if it is not recorded.
    """

    text_length_tokens: int | None
    max_length_tokens: int | None


UNLIMITED = InputLimit(None, None)


def input_limit(run: EvaluationRun, task: TaskResult) -> InputLimit:
    """Returns the bounds on the input length of an lm-eval task; `UNLIMITED` for tasks that record context lengths."""
    if task.record is not None:
        return UNLIMITED
    allowed = run.record.max_length
    if allowed is None:
        written = argument(run.model_args, "max_length") or ""
        allowed = int(written) if re.fullmatch("[0-9]{1,15}", written) else None
    return InputLimit(text_length(task.metadata), allowed)


def text_length(metadata: Mapping[str, Any]) -> int | None:
    """Returns the text length in tokens that a task's metadata requests ("16k" is 16,384).

    Returns None unless the metadata requests exactly one length.
    """
    requested = metadata.get("max_seq_lengths")
    if isinstance(requested, list) and len(requested) == 1:
        requested = requested[0]
    if isinstance(requested, int) and fits(requested, int):
        return requested if requested >= 0 else None
    match = _TEXT.fullmatch(requested.strip()) if isinstance(requested, str) else None
    return int(match["count"]) * _UNITS[match["unit"].lower()] if match else None
