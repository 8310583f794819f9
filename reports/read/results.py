"""The tidy table between reading and drawing: one row a measured number, and one a position bin."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from sbeval.reports.analyse.needles import tabulate_needles
from sbeval.reports.analyse.positions import PositionSums, read_positions
from sbeval.reports.read.measurements import task_rows
from sbeval.reports.read.models import EvaluatedModel, group_models
from sbeval.reports.read.notes import Notes
from sbeval.reports.read.runs import EvaluationRun
from sbeval.reports.read.sample_scores import SampleScores, read_all_scores
from sbeval.reports.read.samples import SumsByDocument, read_documents
from sbeval.reports.read.spans import tabulate_spans

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
POSITION_COLUMNS = [
    "setting",
    "task",
    "corpus",
    "corpus_sha256",
    "context_length_tokens",
    "first",
    "last",
    "nll",
    "ci95_low",
    "ci95_high",
    "tokens",
    "clusters",
    "tokenizer_sha256",
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
_CONTEXT_KEYS = [
    "setting",
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Everything a report draws and says.

    Attributes:
        models: the lines of the figures, in the order shown.
        measurements: one row a number, columns `MEASUREMENT_COLUMNS`; NaN where missing.
        positions: one row a position bin, columns `POSITION_COLUMNS`.
        needles: one row a heatmap cell, columns `sbeval.reports.analyse.needles.NEEDLE_COLUMNS`.
        spans: one row a layer and head, columns `sbeval.reports.read.spans.SPAN_COLUMNS`.
        documents: (model label, task) to the per-document sums, where samples were logged.
        samples: (model label, task) to the scores of single samples, where they were logged.
        position_sums: (model label, task) to the per-document sums by position, or why there are none.
        notes: what was left out and why.
    """

    models: tuple[EvaluatedModel, ...]
    measurements: pd.DataFrame
    positions: pd.DataFrame
    needles: pd.DataFrame
    spans: pd.DataFrame
    documents: Mapping[tuple[str, str], SumsByDocument]
    samples: Mapping[tuple[str, str], SampleScores]
    position_sums: Mapping[tuple[str, str], PositionSums]
    notes: Notes

    def model(self, label: str) -> EvaluatedModel:
        """Returns the model of a label."""
        return next(model for model in self.models if model.label == label)


def tabulate(runs: Sequence[EvaluationRun], notes: Notes, *, labels: Mapping[str, str] | None = None) -> Results:
    """Builds the tidy table of all runs.

    Of several runs of one model the number from most samples counts (`--limit`), and of these the newest.
    """
    models = group_models(runs, labels)
    rows: list[dict[str, Any]] = []
    positions: list[dict[str, Any]] = []
    for model in models:
        for run, task in model.task_runs():
            found, bins = task_rows(model, run, task, notes)
            rows += found
            positions += bins
    measurements = _frame(rows, MEASUREMENT_COLUMNS)
    measurements = _first(measurements, _CONTEXT_KEYS, notes)
    position_frame = _frame(positions, [*POSITION_COLUMNS, "run_date", "results_file"])
    counting = position_frame.groupby(["setting", "task", "corpus_sha256"], dropna=False)["results_file"]
    shown = position_frame["results_file"] == counting.transform("first")
    position_frame = position_frame[shown][POSITION_COLUMNS].reset_index(drop=True)
    samples = read_all_scores(models, notes)
    return Results(
        models=tuple(models),
        measurements=measurements,
        positions=position_frame,
        needles=tabulate_needles(samples),
        spans=tabulate_spans(models),
        documents=read_documents(models, notes),
        samples=samples,
        position_sums=read_positions(models, notes),
        notes=notes,
    )


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns a table's rows as dictionaries by column name."""
    if frame.empty:
        return []
    columns = {str(name): column.tolist() for name, column in frame.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def by_setting(frame: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Returns model label to its rows as dictionaries, in the table's order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in records(frame):
        found.setdefault(row["setting"], []).append(row)
    return found


def _frame(rows: list[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    cells = {column: pd.Series([row.get(column) for row in rows], dtype=object) for column in columns}
    frame = pd.DataFrame(cells, columns=columns)
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
