"""Everything a report is made from: the tidy table, and what each reader found beside it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pandas as pd

from sbeval.reports.read.answers import ANSWERS
from sbeval.reports.read.files import Notes
from sbeval.reports.read.measurements import tabulate_measurements
from sbeval.reports.read.models import EvaluatedModel, group_models, note_other_inputs
from sbeval.reports.read.positions import POSITION_SUMS, POSITIONS
from sbeval.reports.read.rows import Reader
from sbeval.reports.read.runs import EvaluationRun, TaskResult
from sbeval.reports.read.samples import DOCUMENT_SUMS, SAMPLE_SCORES
from sbeval.reports.read.spans import SPANS

T = TypeVar("T")
READERS: tuple[Reader[Any], ...] = (POSITIONS, SAMPLE_SCORES, SPANS, DOCUMENT_SUMS, POSITION_SUMS, ANSWERS)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Everything a report draws and says; `results[READER]` is what a reader found.

    Attributes:
        models: the lines of the figures, in the order shown.
        measurements: one row a number, columns `MEASUREMENT_COLUMNS`; NaN where missing.
        by_reader: each of `READERS` to what it found.
        notes: what was left out and why.
    """

    models: tuple[EvaluatedModel, ...]
    measurements: pd.DataFrame
    by_reader: Mapping[Reader[Any], Any]
    notes: Notes

    def __getitem__(self, reader: Reader[T]) -> T:
        """Returns what a reader found."""
        found: T = self.by_reader[reader]
        return found

    def model(self, label: str) -> EvaluatedModel:
        """Returns the model of a label."""
        return next(model for model in self.models if model.label == label)


def tabulate(runs: Sequence[EvaluationRun], notes: Notes, *, labels: Mapping[str, str] | None = None) -> Results:
    """Reads all that the runs hold."""
    models = group_models(_texts_by_one_name(runs), labels)
    note_other_inputs(models, notes)
    return Results(
        models=tuple(models),
        measurements=tabulate_measurements(models, notes),
        by_reader={reader: reader.read(models, notes) for reader in READERS},
        notes=notes,
    )


def _texts_by_one_name(runs: Sequence[EvaluationRun]) -> list[EvaluationRun]:
    """Calls a task's text what its newest run called it: files get other names, and releases named one differently."""
    names = {
        (task.name, task.record.corpus_sha256): task.record.corpus
        for run in sorted(runs, key=lambda run: (run.date, str(run.path)))
        for task in run.tasks
        if task.record is not None and task.record.corpus_sha256 is not None
    }

    def named(task: TaskResult) -> TaskResult:
        if task.record is None or task.record.corpus_sha256 is None:
            return task
        corpus = names[task.name, task.record.corpus_sha256]
        return dataclasses.replace(task, record=dataclasses.replace(task.record, corpus=corpus))

    return [dataclasses.replace(run, tasks=tuple(named(task) for task in run.tasks)) for run in runs]
