"""Restricts results to chosen models and tasks, and chooses the baseline."""

import dataclasses
from collections.abc import Iterable
from fnmatch import fnmatchcase

import pandas as pd

from sbeval.errors import UserError
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.results import Results


def restrict(results: Results, only: Iterable[str]) -> Results:
    """Keeps the models and tasks whose names match; patterns such as `demo-*` are allowed.

    A pattern that names models leaves the other models out, one that names tasks the other tasks.

    Raises:
        UserError: a pattern matches neither a model nor a task.
    """
    labels = [model.label for model in results.models]
    tasks = list(dict.fromkeys([*results.measurements["task"], *results.positions["task"]]))
    kept_labels: list[str] = []
    kept_tasks: list[str] = []
    for pattern in only:
        matching_labels = [
            model.label
            for model in results.models
            if any(pattern == name or fnmatchcase(name, pattern) for name in _names(model))
        ]
        matching_tasks = [task for task in tasks if task == pattern or fnmatchcase(task, pattern)]
        if not matching_labels and not matching_tasks:
            raise UserError(
                f"Expected the name of a model or task, found {pattern!r}; the models are {', '.join(labels)}; "
                f"the tasks are {', '.join(tasks)}."
            )
        kept_labels += matching_labels
        kept_tasks += matching_tasks
    shown_labels, shown_tasks = set(kept_labels or labels), set(kept_tasks or tasks)
    models = tuple(model for model in results.models if model.label in shown_labels)

    def shown(label: str, task: str) -> bool:
        return label in shown_labels and task in shown_tasks

    return dataclasses.replace(
        results,
        models=tuple(
            dataclasses.replace(model, parent=model.parent if model.parent in shown_labels else None)
            for model in models
        ),
        measurements=_rows(results.measurements, shown_labels, shown_tasks),
        positions=_rows(results.positions, shown_labels, shown_tasks),
        needles=_rows(results.needles, shown_labels, shown_tasks),
        spans=_rows(results.spans, shown_labels, shown_tasks),
        documents={key: sums for key, sums in results.documents.items() if shown(*key)},
        samples={key: scores for key, scores in results.samples.items() if shown(*key)},
        position_sums={key: sums for key, sums in results.position_sums.items() if shown(*key)},
    )


def _names(model: EvaluatedModel) -> tuple[str, ...]:
    return tuple(name for name in (model.label, model.record.name, model.record.recipe) if name)


def _rows(frame: pd.DataFrame, labels: set[str], tasks: set[str]) -> pd.DataFrame:
    return frame[frame["setting"].isin(labels) & frame["task"].isin(tasks)].reset_index(drop=True)


def choose_baseline(models: Iterable[EvaluatedModel], asked: str | None) -> str:
    """Returns the label differences are taken against: the one asked for, else the first RoPE model, else the first.

    Raises:
        UserError: no model has the name asked for.
    """
    known = list(models)
    if asked is not None:
        for model in known:
            if asked in _names(model):
                return model.label
        labels = ", ".join(model.label for model in known)
        raise UserError(f"Expected the baseline to be one of the models {labels}, found {asked!r}.")
    rope = [model.label for model in known if model.record.attention == "rope"]
    return (rope or [known[0].label])[0]
