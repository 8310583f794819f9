"""All data of a report: the tidy table with one row for each measured number, and the data of all readers.

A `Reader` reads one kind of data that is not a single number, such as sums by document, and merges the data of several
training seeds into that of one model.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import pandas as pd

from sbeval.errors import brief, visible
from sbeval.foreign_files import usable_number
from sbeval.reports.read.fields import display_name, grouped, is_length
from sbeval.reports.read.files import Notes
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.runs import UNLIMITED, EvaluationRun, InputLimit, TaskResult, input_limit
from sbeval.results.records import OF_ABSENT, OF_PRESENT, TaskRecord, metric_key, parse_metric_key

T = TypeVar("T")
LENGTH = "context_length_tokens"
TaskKey = tuple[str, ...]
"""(model label, task name) or, for perplexity, (model label, task name, hash of the text); "" if it is not recorded."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reader(Generic[T]):
    """Two functions that read one kind of data besides single numbers, and merge that of several training seeds.

    Attributes:
        read: takes all models and the notes; returns a table with columns `setting` (the model's label) and `task`, or
            a mapping from `TaskKey`.
        pool: merges the data of training seeds that the report shows as one model. It takes the return value of `read`,
            a mapping from the label of a seed to that of the merged model, and the notes.
    """

    read: Callable[[Sequence[EvaluatedModel], Notes], T]
    pool: Callable[[T, Mapping[str, str], Notes], T]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """All data of a report. `results[READER]` returns the data that a reader read.

    Attributes:
        models: the evaluated models, in the order shown.
        measurements: the tidy table: one row for each number, columns `COLUMNS`; missing values are NaN.
        by_reader: reader to the data that it read.
        notes: sentences on data that was left out, and why.
        files_left_out: number of results files without usable content.
        texts: names of the texts before labels replace them.
    """

    models: tuple[EvaluatedModel, ...]
    measurements: pd.DataFrame
    by_reader: Mapping[Reader[Any], Any]
    notes: Notes
    files_left_out: int = 0
    texts: Collection[str] = ()

    @property
    def files_text(self) -> str:
        """A text that says how many results files were read and how many were left out."""
        read = len({run.path for model in self.models for run in model.runs})
        left_out = f", {self.files_left_out} left out (see Notes)" if self.files_left_out else ""
        return f"{read} {'file' if read == 1 else 'files'} read{left_out}"

    def __getitem__(self, reader: Reader[T]) -> T:
        """Returns the data that a reader read."""
        data: T = self.by_reader[reader]
        return data

    def behind(self, reader: Reader[Mapping[TaskKey, T]], row: Mapping[str, Any]) -> T | None:
        """Returns the data of a reader for the model, task and text in a row of the tidy table; None if it has none."""
        digest = row["corpus_sha256"]
        return self[reader].get((row["setting"], row["task"], digest if isinstance(digest, str) else ""))

    def model(self, label: str) -> EvaluatedModel:
        """Returns the model with this label."""
        return next(model for model in self.models if model.label == label)

    @property
    def labels_by_task(self) -> dict[str, set[str]]:
        """Name of each task that has a row in the tidy table or data of a reader, to the labels of its models."""
        labels: dict[str, set[str]] = {}
        for data in (self.measurements, *self.by_reader.values()):
            pairs = data[["setting", "task"]].values if isinstance(data, pd.DataFrame) else [key[:2] for key in data]
            for label, task in pairs:
                labels.setdefault(task, set()).add(label)
        return labels

    @property
    def tasks(self) -> list[str]:
        """Names of all tasks that have a row in the tidy table or data of a reader."""
        return list(self.labels_by_task)


def restricted(rows: Any, labels: set[str], tasks: set[str]) -> Any:
    """Returns the part of `rows`, a table or the data of a reader, that belongs to the given models and tasks."""
    if isinstance(rows, pd.DataFrame):
        return rows[rows["setting"].isin(labels) & rows["task"].isin(tasks)].reset_index(drop=True)
    return {key: value for key, value in rows.items() if key[0] in labels and key[1] in tasks}


def averaging(average: Callable[[Sequence[T]], T]) -> Callable[..., dict[TaskKey, T]]:
    """Returns a function for `Reader.pool`, for a reader that returns a mapping from `TaskKey`.

    The function calls `average` to merge the values of several training seeds into one.
    """

    def pool(by_seed: Mapping[TaskKey, T], pooled_label: Mapping[str, str], notes: Notes) -> dict[TaskKey, T]:
        groups = grouped(((pooled_label.get(key[0], key[0]), *key[1:]), value) for key, value in by_seed.items())
        return {key: members[0] if len(members) == 1 else average(members) for key, members in groups.items()}

    return pool


def column_values(frame: pd.DataFrame, column: str = LENGTH) -> list[int]:
    """Returns the distinct integers in a column, in ascending order."""
    return sorted(int(value) for value in frame[column].dropna().unique())


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns a table's rows as dictionaries by column name."""
    columns = {str(name): column.tolist() for name, column in frame.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def by_model(frame: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Returns model label to the rows of the model as dictionaries, in the order of the table."""
    return grouped((row["setting"], row) for row in records(frame))


TEXT = "object"
DECIMAL = "float64"
WHOLE = "Int64"
"""Types of columns: pandas' dtypes."""


class Measurement(NamedTuple):
    """One number of a results file, with the model, run, task and metric that it belongs to.

    Attributes:
        metric: the metric's name, without context length.
        filter_name: name of lm-eval's filter; empty if there is none.
        length: context length in tokens; None for a metric without one.
        name: the metric's key in the results file, without the filter.
        interval: lower and upper end of the number's 95% interval; NaN if it has none.
    """

    model: EvaluatedModel
    run: EvaluationRun
    task: TaskResult
    metric: str
    filter_name: str
    length: int | None
    name: str
    value: float
    interval: tuple[float, float]

    @property
    def limit(self) -> InputLimit:
        """The bounds on the input length, for a metric without a context length."""
        return UNLIMITED if self.length is not None else input_limit(self.run, self.task)

    @property
    def stderr(self) -> float | None:
        """The number's standard error; None if the results file has none."""
        return usable_number(self.task.metrics.get(f"{self.name}_stderr,{self.filter_name}"))

    def beside(self, name: str) -> float | None:
        """Returns the value of another metric of the task at the same context length; None if there is none."""
        if self.length is None:
            return None
        key = metric_key(name, self.length)
        return usable_number(self.task.metrics.get(f"{key},{self.filter_name}", self.task.metrics.get(key)))


class Column(NamedTuple):
    """A column of the tidy table.

    Attributes:
        name: the column's name.
        read: a function that takes a number and returns the cell of this column; None for a missing value.
        kind: the pandas dtype.
        key: whether the column belongs to `NUMBER_KEYS`, which together identify one number of a model.
    """

    name: str
    read: Callable[[Measurement], Any]
    kind: str = TEXT
    key: bool = False


def _recorded(field: str) -> Callable[[Measurement], Any]:
    """Returns a function that reads a field of the task's record."""
    return lambda number: getattr(number.task.record, field, None)


def _corpus(number: Measurement) -> str | None:
    corpus = number.task.record and number.task.record.corpus
    return display_name(corpus) if corpus else None


def _samples(number: Measurement) -> float | None:
    """Returns how many samples a number is computed from; None for perplexity, computed from tokens and documents."""
    record = number.task.record
    if record and record.family == "perplexity":
        return None
    fitting = record and record.fitting_samples
    samples = fitting.get(str(number.length)) if fitting else number.task.samples_used
    absent = ((record and record.absent_samples) or {}).get(str(number.length))
    if absent is not None and number.metric in OF_ABSENT:
        return absent
    if samples is None or absent is None or number.metric not in OF_PRESENT:
        return samples
    return samples - absent


def _at_length(field: str) -> Callable[[Measurement], Any]:
    """Returns a function that reads the value of a number's context length from a field of the task's record."""
    return lambda number: (getattr(number.task.record, field, None) or {}).get(str(number.length))


COLUMNS = (
    Column("setting", lambda number: number.model.label),
    Column("task", lambda number: display_name(number.task.name), key=True),
    Column("family", _recorded("family")),
    Column("corpus", _corpus),
    Column("corpus_sha256", _recorded("corpus_sha256"), key=True),
    Column("protocol", _recorded("protocol"), key=True),
    Column("metric", lambda number: number.metric, key=True),
    Column("filter", lambda number: number.filter_name or None, key=True),
    Column("context_length_tokens", lambda number: number.length, WHOLE, key=True),
    Column("text_length_tokens", lambda number: number.limit.text_length_tokens, WHOLE, key=True),
    Column("max_length_tokens", lambda number: number.limit.max_length_tokens, WHOLE, key=True),
    Column("value", lambda number: number.value, DECIMAL),
    Column("ci95_low", lambda number: number.interval[0], DECIMAL),
    Column("ci95_high", lambda number: number.interval[1], DECIMAL),
    Column("stderr", lambda number: number.stderr, DECIMAL),
    Column("tokens", lambda number: number.beside("tokens"), DECIMAL),
    Column("clusters", lambda number: number.beside("clusters"), DECIMAL),
    Column("samples", _samples, DECIMAL),
    Column("level", _recorded("level")),
    Column("absent_samples", _at_length("absent_samples"), WHOLE),
    Column("left_out_samples", _at_length("left_out_samples"), WHOLE),
    Column("cut_samples", _at_length("cut_samples"), WHOLE),
    Column("samples_sha256", _at_length("samples_sha256")),
    Column("few_shot", lambda number: number.task.few_shot, WHOLE, key=True),
    Column("higher_is_better", lambda number: number.task.higher_is_better.get(number.metric)),
    *(Column(name, _recorded(name)) for name in ("bos", "separator", "targets_per_window", "targets_sha256")),
    Column("tokenizer_sha256", _recorded("tokenizer_sha256")),
    Column("seed", _recorded("seed"), WHOLE),
    Column("attention", lambda number: number.run.record.attention),
    Column("training_length_tokens", lambda number: number.run.record.training_length_tokens, WHOLE),
    Column("sliding_window", lambda number: number.run.record.sliding_window, WHOLE),
    Column("run_date", lambda number: number.run.date),
    Column("results_file", lambda number: visible(str(number.run.path))),
    Column("limit_samples", lambda number: number.task.limit_samples, DECIMAL),
)
NUMBER_KEYS = [column.name for column in COLUMNS if column.key]
"""The columns that together identify one number of a model."""


def tabulate_measurements(models: Sequence[EvaluatedModel], notes: Notes) -> pd.DataFrame:
    """Returns the tidy table: one row for each number, columns `COLUMNS`; missing values are NaN.

    If several runs of a model have the same number, the one from most samples is used (`--limit`), then the newest.
    """
    results = [(model, run, task) for model in models for run, task in model.task_runs()]
    numbers = (number for result in results for number in _numbers(*result, notes))
    rows = [{column.name: column.read(number) for column in COLUMNS} for number in numbers]
    table = typed_frame(rows, {column.name: column.kind for column in COLUMNS})
    table["run_date"] = pd.to_datetime(table["run_date"], utc=True)
    return _first(table, notes)


def typed_frame(rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> pd.DataFrame:
    """Returns rows as a table with the columns and dtypes of `kinds`."""
    frame = pd.DataFrame({name: pd.Series([row.get(name) for row in rows], dtype=object) for name in kinds})
    return frame.astype(dict(kinds))


def _first(measurements: pd.DataFrame, notes: Notes) -> pd.DataFrame:
    """Keeps the first row of each number, and adds notes on the runs whose numbers are therefore not shown."""
    repeated = measurements.duplicated(["setting", *NUMBER_KEYS], keep="first")
    first = measurements[~repeated]
    dates = {(row["setting"], row["task"]): row["run_date"] for row in records(first.iloc[::-1])}
    for (model, file, task), rows in measurements[repeated].groupby(["setting", "results_file", "task"], sort=True):
        lengths = rows["context_length_tokens"].dropna().nunique()
        where = f" at {lengths} context lengths" if lengths else ""
        if rows["run_date"].iloc[0] > dates[model, task]:
            notes.add(None, f"{model}: {task}{where} was run on more samples; those in {file} are not shown.")
        else:
            notes.add(None, f"{model}: {task}{where} was run again later; the older numbers in {file} are not shown.")
    order = ["setting", "task", "metric", LENGTH]
    return first.sort_values(order, kind="stable", ignore_index=True)


def _numbers(model: EvaluatedModel, run: EvaluationRun, task: TaskResult, notes: Notes) -> Iterator[Measurement]:
    """Yields the numbers of a task. For a value that is not a finite number it adds a note instead."""
    for key, value in task.metrics.items():
        name, _, filter_name = key.partition(",")
        parsed = _metric_and_length(name, task.record)
        if parsed is None:
            continue
        metric, length = parsed
        if length is not None and not is_length(length):
            notes.add(run.path, f"{task.name}: {name} left out: {length} is no context length.")
            continue
        number = usable_number(value)
        # lm-eval writes N/A if it computes no number, and its own RULER tasks write -1 for lengths that were not run
        if number is None or (task.record is None and length is not None and number == -1 and metric == "score"):
            if number is None and (length or not isinstance(value, list)) and value not in (None, "N/A", "", " "):
                notes.add(run.path, f"{task.name}: {name} is {brief(value)}; left as missing.")
            continue
        ends = f"{metric}_ci95" if length is None else metric_key(f"{metric}_ci95", length)
        interval = interval_ends(task.metrics.get(f"{ends},{filter_name}", task.metrics.get(ends)))
        yield Measurement(model, run, task, metric, filter_name, length, name, number, interval)


def _metric_and_length(name: str, record: TaskRecord | None) -> tuple[str, int | None] | None:
    if name in ("alias", "sample_len", "sample_count", "name", " ") or name.endswith("_stderr"):
        return None
    parsed = parse_metric_key(name)
    if parsed is not None:
        return None if parsed[0].endswith("_ci95") or parsed[0] in ("tokens", "clusters") else parsed
    if name.startswith("position_"):
        return None
    if name.isascii() and name.isdigit() and len(name) < 30:  # lm-eval's own RULER tasks use a length as metric name
        return "score", int(name)
    return name, None


def interval_ends(value: Any) -> tuple[float, float]:
    """Returns both ends of an interval in a results file; NaN if `value` is not a list of two numbers."""
    if isinstance(value, list) and len(value) == 2:
        low, high = usable_number(value[0]), usable_number(value[1])
        if low is not None and high is not None:
            return low, high
    return math.nan, math.nan
