"""Everything a report is made from: the tidy table, one row a measured number, and what readers find beside it.

A reader brings one kind of data that runs hold beside single numbers, and says how training seeds become one.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import pandas as pd

from sbeval.errors import shown, visible
from sbeval.foreign_files import usable_number
from sbeval.reports.read.fields import grouped, is_length, shown_name
from sbeval.reports.read.files import Notes
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.runs import UNLIMITED, EvaluationRun, InputLimit, TaskResult, input_limit
from sbeval.results.records import TaskRecord, metric_key, parse_metric_key

T = TypeVar("T")
LENGTH = "context_length_tokens"
TaskKey = tuple[str, ...]
"""A model's label, a task's name and, of what was measured on a text, the text's hash, empty where not recorded."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reader(Generic[T]):
    """Reads one kind of data that runs hold beside single numbers.

    Attributes:
        read: takes all models and the notes; returns a table with columns `setting` (the model's label) and `task`, or
            a mapping from `TaskKey`.
        pool: shows training seeds as one model: takes what `read` returned, the label of each seed's model to its
            group's label, and the notes.
    """

    read: Callable[[Sequence[EvaluatedModel], Notes], T]
    pool: Callable[[T, Mapping[str, str], Notes], T]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Everything a report draws and says; `results[READER]` is what a reader brought.

    Attributes:
        models: the lines of the figures, in the order shown.
        measurements: one row a number, columns `COLUMNS`; NaN where missing.
        by_reader: each reader to what it brought.
        notes: what was left out and why.
        files_left_out: how many results files hold nothing that can be used.
        texts: names of the texts before any label.
    """

    models: tuple[EvaluatedModel, ...]
    measurements: pd.DataFrame
    by_reader: Mapping[Reader[Any], Any]
    notes: Notes
    files_left_out: int = 0
    texts: Collection[str] = ()

    @property
    def files_text(self) -> str:
        """How many results files were read, and how many left out."""
        read = len({run.path for model in self.models for run in model.runs})
        left_out = f", {self.files_left_out} left out (see Notes)" if self.files_left_out else ""
        return f"{read} {'file' if read == 1 else 'files'} read{left_out}"

    def __getitem__(self, reader: Reader[T]) -> T:
        """Returns what a reader brought."""
        brought: T = self.by_reader[reader]
        return brought

    def behind(self, reader: Reader[Mapping[TaskKey, T]], row: Mapping[str, Any]) -> T | None:
        """Returns what a reader brought of the model, the task and the text of a row of the table."""
        digest = row["corpus_sha256"]
        return self[reader].get((row["setting"], row["task"], digest if isinstance(digest, str) else ""))

    def model(self, label: str) -> EvaluatedModel:
        """Returns the model of a label."""
        return next(model for model in self.models if model.label == label)

    @property
    def tasks(self) -> list[str]:
        """Names of all tasks of which a number or a reader's data is there."""
        names = self.measurements["task"].tolist()
        for brought in self.by_reader.values():
            names += brought["task"].tolist() if isinstance(brought, pd.DataFrame) else [key[1] for key in brought]
        return list(dict.fromkeys(names))


def restricted(rows: Any, labels: set[str], tasks: set[str]) -> Any:
    """Returns the part of what a reader returned that is about these models and tasks."""
    if isinstance(rows, pd.DataFrame):
        return rows[rows["setting"].isin(labels) & rows["task"].isin(tasks)].reset_index(drop=True)
    return {key: value for key, value in rows.items() if key[0] in labels and key[1] in tasks}


def averaging(average: Callable[[Sequence[T]], T]) -> Callable[..., dict[TaskKey, T]]:
    """Returns the `Reader.pool` of a mapping whose values are averaged over seeds."""

    def pool(by_seed: Mapping[TaskKey, T], pooled_label: Mapping[str, str], notes: Notes) -> dict[TaskKey, T]:
        groups = grouped(((pooled_label.get(key[0], key[0]), *key[1:]), value) for key, value in by_seed.items())
        return {key: members[0] if len(members) == 1 else average(members) for key, members in groups.items()}

    return pool


def column_values(frame: pd.DataFrame, column: str = LENGTH) -> list[int]:
    """Returns the whole numbers that stand in a column, each once, ascending."""
    return sorted(int(value) for value in frame[column].dropna().unique())


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns a table's rows as dictionaries by column name."""
    columns = {str(name): column.tolist() for name, column in frame.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def by_model(frame: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Returns model label to its rows as dictionaries, in the table's order."""
    return grouped((row["setting"], row) for row in records(frame))


TEXT = "object"
DECIMAL = "float64"
WHOLE = "Int64"
"""What a column holds, as pandas calls it."""


class Measurement(NamedTuple):
    """One number, and where it stands.

    Attributes:
        filter_name: lm-eval's filter before it, empty for none.
        length: context length in tokens, None for a metric without one.
        name: the metric as the results file names it.
        interval: ends of its 95% interval, NaN without one.
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
        """What bounded the inputs, where the metric names no context length."""
        return UNLIMITED if self.length is not None else input_limit(self.run, self.task)

    @property
    def stderr(self) -> float | None:
        """Its standard error, where the task holds one."""
        return usable_number(self.task.metrics.get(f"{self.name}_stderr,{self.filter_name}"))

    def beside(self, name: str) -> float | None:
        """Returns another number that the task holds at this length."""
        if self.length is None:
            return None
        key = metric_key(name, self.length)
        return usable_number(self.task.metrics.get(f"{key},{self.filter_name}", self.task.metrics.get(key)))


class Column(NamedTuple):
    """A column of the tidy table, its cells None where missing; a key is part of what names one number of a model."""

    name: str
    read: Callable[[Measurement], Any]
    kind: str = TEXT
    key: bool = False


def _recorded(field: str) -> Callable[[Measurement], Any]:
    """Reads a field of the task's record."""
    return lambda number: getattr(number.task.record, field, None)


def _corpus(number: Measurement) -> str | None:
    corpus = number.task.record and number.task.record.corpus
    return shown_name(corpus) if corpus else None


def _samples(number: Measurement) -> float | None:
    """A perplexity task's numbers rest on tokens and documents: its samples are blocks of text."""
    record = number.task.record
    return None if record and record.family == "perplexity" else number.task.samples_used


COLUMNS = (
    Column("setting", lambda number: number.model.label),
    Column("task", lambda number: shown_name(number.task.name), key=True),
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
"""What names one number of a model."""


def tabulate_measurements(models: Sequence[EvaluatedModel], notes: Notes) -> pd.DataFrame:
    """Returns one row a number, `COLUMNS`; NaN where missing.

    Of several runs of one model the number from most samples counts (`--limit`), and of these the newest.
    """
    results = [(model, run, task) for model in models for run, task in model.task_runs()]
    numbers = (number for result in results for number in _numbers(*result, notes))
    rows = [{column.name: column.read(number) for column in COLUMNS} for number in numbers]
    table = typed_frame(rows, {column.name: column.kind for column in COLUMNS})
    table["run_date"] = pd.to_datetime(table["run_date"], utc=True)
    return _first(table, notes)


def typed_frame(rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> pd.DataFrame:
    """Returns the columns of rows as a table; `kinds` says what each holds."""
    frame = pd.DataFrame({name: pd.Series([row.get(name) for row in rows], dtype=object) for name in kinds})
    return frame.astype(dict(kinds))


def _first(measurements: pd.DataFrame, notes: Notes) -> pd.DataFrame:
    repeated = measurements.duplicated(["setting", *NUMBER_KEYS], keep="first")
    kept = measurements[~repeated]
    dates = {(row["setting"], row["task"]): row["run_date"] for row in records(kept.iloc[::-1])}
    for (model, file, task), rows in measurements[repeated].groupby(["setting", "results_file", "task"], sort=True):
        lengths = rows["context_length_tokens"].dropna().nunique()
        where = f" at {lengths} context lengths" if lengths else ""
        if rows["run_date"].iloc[0] > dates[model, task]:
            notes.add(None, f"{model}: {task}{where} was run on more samples; those in {file} are not shown.")
        else:
            notes.add(None, f"{model}: {task}{where} was run again later; the older numbers in {file} are not shown.")
    order = ["setting", "task", "metric", LENGTH]
    return kept.sort_values(order, kind="stable", ignore_index=True)


def _numbers(model: EvaluatedModel, run: EvaluationRun, task: TaskResult, notes: Notes) -> Iterator[Measurement]:
    """Yields the numbers of a task; one that is not finite becomes a note."""
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
        # lm-eval writes N/A where there is nothing to compute, and its own ruler -1 at a length that was not asked for
        if number is None or (task.record is None and length is not None and number == -1 and metric == "score"):
            if number is None and (length or not isinstance(value, list)) and value not in (None, "N/A", "", " "):
                notes.add(run.path, f"{task.name}: {name} is {shown(value)}; left as missing.")
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
    if name.isascii() and name.isdigit() and len(name) < 30:  # lm-eval's own ruler names its metrics by length alone
        return "score", int(name)
    return name, None


def interval_ends(value: Any) -> tuple[float, float]:
    """Returns the ends of an interval as results files hold it, NaN where there is none."""
    if isinstance(value, list) and len(value) == 2:
        low, high = usable_number(value[0]), usable_number(value[1])
        if low is not None and high is not None:
            return low, high
    return math.nan, math.nan
