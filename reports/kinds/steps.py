"""The section on checkpoints of one training: NLL at each context length against the training step."""

import re
from collections import defaultdict
from collections.abc import Sequence

import pandas as pd

from sbeval.reports.analyse.panels import safe_stem
from sbeval.reports.figures.steps import step_figure
from sbeval.reports.read.fields import length_text, shown_name
from sbeval.reports.read.models import EvaluatedModel
from sbeval.reports.read.runs import argument
from sbeval.reports.section import Figure, Kind, Material, Section
from sbeval.reports.table import NOT_MEASURED, Cell, Table, row, texts

_CHECKPOINT = re.compile(r"(?P<training>.+)/checkpoint-(?P<step>[0-9]{1,12})/?")
_METRIC = "nll"


def steps_section(material: Material) -> Section | None:
    """Builds the section, None where no two checkpoints are of one training and measured alike."""
    figures: list[Figure] = []
    tables: list[Table] = []
    for training, steps in _trainings(material.results.models).items():
        measured = material.results.measurements
        own = measured[(measured["metric"] == _METRIC) & measured["setting"].isin(steps)]
        own = own.dropna(subset=["value", "context_length_tokens"])
        own = own[own["value"].map(lambda value: value == value)]
        for task, of_task in own.groupby("task", sort=False):
            rows = of_task.assign(step=of_task["setting"].map(steps), context=of_task["context_length_tokens"])
            rows = rows.drop_duplicates(["step", "context_length_tokens"]).sort_values("step")
            if rows["step"].nunique() > 1:
                figures.append(_figure(material, training, str(task), rows))
                tables.append(_table(training, str(task), rows))
    if not figures:
        return None
    return Section(
        identifier="steps",
        title="Over training steps",
        lead="Checkpoints of one training (folders checkpoint-STEP) on the same text, one line a context length.",
        figures=tuple(figures),
        tables=tuple(tables),
    )


def _trainings(models: Sequence[EvaluatedModel]) -> dict[str, dict[str, int]]:
    """Returns folder of a training to its checkpoints: label to step, which counts from 1."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for model in models:
        match = _CHECKPOINT.fullmatch(argument(model.runs[0].model_args, "pretrained") or "")
        if match is not None and int(match["step"]) > 0:
            found[match["training"]][model.label] = int(match["step"])
    return found


def _figure(material: Material, training: str, task: str, rows: pd.DataFrame) -> Figure:
    first, last = int(rows["step"].min()), int(rows["step"].max())
    changes = []
    for length, of_length in rows.groupby("context_length_tokens"):
        ends = of_length.set_index("step")["value"]
        if first in ends and last in ends:
            changes.append(f"{length_text(int(str(length)))} {ends[first]:.3f} to {ends[last]:.3f}")
    finding = f"From step {first:,} to {last:,}, NLL in nats: {', '.join(changes) or 'no length at both'}."
    title = f"{shown_name(training.rpartition('/')[2])}: {task}"
    spec = step_figure(rows, title=title, subtitle="NLL at each context length", description=f"{title}. {finding}")
    return material.figure({_METRIC: spec}, _stem(training, task), title=title, finding=finding)


def _table(training: str, task: str, rows: pd.DataFrame) -> Table:
    lengths = sorted(int(length) for length in rows["context_length_tokens"].unique())
    values = {
        (int(step), int(length)): float(value)
        for step, length, value in zip(rows["step"], rows["context_length_tokens"], rows["value"], strict=True)
    }
    steps = sorted({step for step, _ in values})
    caption = f"NLL in nats over training steps, {shown_name(training.rpartition('/')[2])}: {task}"
    return Table(
        stem=_stem(training, task),
        caption=caption,
        header=texts("step", *map(length_text, lengths)),
        rows=tuple(
            row(Cell(f"{step:,}"), [_shown(values.get((step, length))) for length in lengths]) for step in steps
        ),
        folded=f"Numbers: {caption}",
    )


def _shown(value: float | None) -> Cell | str:
    return NOT_MEASURED if value is None else f"{value:.4f}"


def _stem(training: str, task: str) -> str:
    return f"steps-{safe_stem(training.rpartition('/')[2])}-{safe_stem(task)}"


KIND = Kind(section=steps_section)
